"""The manager, one per job: knows every node and rank; coordinates stop, repair and resume."""
