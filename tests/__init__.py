from pathlib import Path

ROOT = Path(__file__).parents[1]
"""The top of the repository."""
