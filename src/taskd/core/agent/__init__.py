"""The agent's decisions: which processes to start and stop, and what their exits mean."""
