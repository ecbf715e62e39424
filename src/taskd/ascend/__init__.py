"""Everything that speaks to Ascend's own parts, and what stands behind their import paths."""
