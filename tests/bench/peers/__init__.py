"""The same small training job under different recovery systems, and the same fault for each.

workload   the job: model, data, optimizer, and the line that each rank writes after each step
trial      the fault and the measure: start, kill one rank, wait for a step of all ranks
venvs      a virtual environment per peer, made on demand
train/     the training scripts, one per way to write such a job
the rest   one module per contender, with `trial() -> Outcome`
"""
