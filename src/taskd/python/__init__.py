"""The import paths that MindCluster documents: re-exports and thin adapters."""
