"""In-process recovery for PyTorch: process group, step, state, repair."""
