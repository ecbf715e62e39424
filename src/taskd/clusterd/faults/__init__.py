"""From the reports of devices, nodes, switches and third parties to the faults of each job."""
