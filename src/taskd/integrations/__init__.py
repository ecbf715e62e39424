"""Adapters for training frameworks: each in one file, for the versions that it was written for."""
