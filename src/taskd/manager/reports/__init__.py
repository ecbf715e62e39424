"""What the manager publishes: status, metrics, incidents, evidence."""
