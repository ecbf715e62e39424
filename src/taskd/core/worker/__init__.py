"""How a training process decides: parked, repaired, resumed."""
