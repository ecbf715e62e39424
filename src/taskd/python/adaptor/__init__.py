"""Documented import paths: integration with training frameworks."""
