"""One per cluster or per job: decides how each job recovers, and keeps the state of all jobs."""
