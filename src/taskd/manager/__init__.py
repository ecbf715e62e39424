"""One a job: knows every node and rank; coordinates stop, repair and resume."""
