"""The training state: what is protected, how it is undone, moved and saved."""
