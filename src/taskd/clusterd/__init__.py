"""One a cluster: chooses the way out of a fault, and remembers."""
