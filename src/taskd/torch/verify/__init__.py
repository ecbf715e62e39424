"""A wrong gradient is found by computing it again on another rank (`verify_every`)."""
