"""The import paths that MindCluster documents. They only re-export `taskd.ascend.documented`."""
