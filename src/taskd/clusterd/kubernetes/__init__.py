"""Kubernetes behind clusterd: its objects, the records of jobs, and the lease of the leader."""
