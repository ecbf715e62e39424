"""Everything that talks to Ascend's own components, and the code behind their import paths."""
