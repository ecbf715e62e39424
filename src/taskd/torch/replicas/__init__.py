"""Whether ranks hold the same: comparison, proof before a repair, the guard."""
