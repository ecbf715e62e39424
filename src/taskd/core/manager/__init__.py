"""The manager's decisions: faults, incidents, parking, repair plans, liveness, stragglers."""
