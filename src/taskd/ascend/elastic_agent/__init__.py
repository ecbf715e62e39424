"""Implementations behind `mindx_elastic`, which only re-exports them."""
