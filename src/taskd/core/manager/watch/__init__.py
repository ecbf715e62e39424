"""What the manager concludes from what it sees: hung, slow, silent and bad."""
