"""Documented import path."""
