"""The documented place of the native library."""
