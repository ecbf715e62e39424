"""Files and folders that other processes or users can reach."""
