"""Profiling inside the training process: hooks, records, and how long each part of a step took."""
