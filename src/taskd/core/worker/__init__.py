"""The worker's decisions: how a training process parks, is repaired and resumes."""
