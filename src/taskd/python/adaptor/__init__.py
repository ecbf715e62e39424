"""Documented import paths: the seams to training frameworks."""
