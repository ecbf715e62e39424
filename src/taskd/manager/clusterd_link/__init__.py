"""The manager's connection to clusterd, in another process or embedded."""
