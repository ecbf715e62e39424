"""How a job is repaired: who is replaced, where state is, where all ranks resume."""
