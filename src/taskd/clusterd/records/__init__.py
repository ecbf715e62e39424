"""A job as records of a journal: what clusterd keeps of it, and where."""
