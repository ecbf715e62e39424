"""Documented import path of the generated Recover code."""
