"""Documented import paths: what agents, manager and workers share."""
