"""Implementations behind `taskd.api` and `taskd.python`, which only re-export them."""
