"""Stress tests and link switches, which a rank carries out while it is parked."""
