"""Documented import paths: the manager and its MindIO controller."""
