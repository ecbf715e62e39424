"""Documented import path of the native library."""
