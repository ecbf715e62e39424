"""Where a rank is in the script's loop, and what a replacement needs to enter it."""
