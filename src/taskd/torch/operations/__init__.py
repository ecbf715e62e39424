"""Stress tests and link switches, carried out while the rank is parked."""
