"""Documented import paths."""
