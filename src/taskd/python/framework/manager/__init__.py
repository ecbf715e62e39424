"""The documented home of the manager and of its bridge to MindIO."""
