"""Looking inside a MindSpore job. Loaded by `init_taskd_worker(…, framework="ms")`."""
