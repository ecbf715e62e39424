"""`Worker` and `StressStatus` at their documented path."""
