"""Documented import paths for the log, the validators and addresses."""
