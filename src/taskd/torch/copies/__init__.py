"""Copies of sharded state in shared memory, and second copies on another node."""
