"""Adapters for training frameworks, each for the versions that it was written for."""
