"""Bounds: connections, descriptors, rates."""
