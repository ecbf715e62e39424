"""Agents inside another launcher: torchrun, msrun, and registered callbacks."""
