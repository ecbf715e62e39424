"""The part of TaskD inside the training process: progress, profiling, stress test, NIC switch."""
