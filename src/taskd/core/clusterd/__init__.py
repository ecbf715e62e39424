"""How clusterd decides: one recovery machine per job."""
