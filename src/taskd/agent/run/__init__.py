"""The `taskd run` command: arguments, plan, launcher, summary."""
