"""The subcommands that talk to a running clusterd, and `taskd trace`."""
