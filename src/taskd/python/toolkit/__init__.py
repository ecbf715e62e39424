"""Documented import paths: constants, reset files, the recover client."""
