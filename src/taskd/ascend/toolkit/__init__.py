"""Constants, validators and the log behind the documented import paths."""
