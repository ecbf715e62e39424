"""Documented import paths: agents, manager and workers."""
