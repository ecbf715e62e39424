"""How the bus decides: delivery on one link, routing, and the relay of one node."""
