"""Inside the training process: progress, profiling, stress test, link switch."""
