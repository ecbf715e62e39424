"""The cluster behind clusterd: its objects, and the places they can live in."""
