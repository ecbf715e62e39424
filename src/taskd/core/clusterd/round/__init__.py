"""One round of a repair or an operation: its start, its progress, its end."""
