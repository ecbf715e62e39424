"""What a process does before its first step."""
