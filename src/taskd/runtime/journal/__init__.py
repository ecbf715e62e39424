"""The journal: one SQLite file with state and history."""
