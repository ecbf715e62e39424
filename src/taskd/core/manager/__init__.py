"""How the manager of one job decides."""
