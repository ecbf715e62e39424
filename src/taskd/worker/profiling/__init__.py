"""What a training process records about its steps, and where it writes that."""
