"""Processes of a node that run beside the agent."""
