"""The agent: one process per node, which owns the worker processes of that node."""
