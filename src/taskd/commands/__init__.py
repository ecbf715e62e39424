"""What people see of clusterd: `taskd status`, `jobs`, `replay` and `fault`."""
