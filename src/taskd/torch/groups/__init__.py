"""Process groups that survive the loss of a member."""
