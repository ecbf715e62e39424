"""How an agent decides: which processes to start and stop, and what their deaths mean."""
