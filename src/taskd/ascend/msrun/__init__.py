"""MindSpore's msrun plugin and the fault checker that it uses."""
