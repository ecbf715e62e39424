"""Profiling hooks for MindSpore. Loaded by `init_taskd_worker(…, framework="ms")`."""
