"""What is recorded about a PyTorch step."""
