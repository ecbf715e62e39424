"""The same small training job under different recovery systems, and the same fault for each.

workload   the job: model, data, optimizer, and the line that each rank writes after each step
trial      the fault and the measure: start, watch, SIGKILL one rank, wait for the full world
venvs      a virtual environment for each peer, made on demand
train/     the training scripts, one for each way to write such a job
the rest   one module a contender; each offers `trial() -> Outcome`
"""
