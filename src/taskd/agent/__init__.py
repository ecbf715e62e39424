"""One a node: owns the worker processes."""
