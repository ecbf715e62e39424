"""Checkpoints that TaskD itself writes: continuous ones and emergency ones."""
