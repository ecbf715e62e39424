"""`init_taskd_worker`, `start_taskd_worker`, `destroy_taskd_worker`, on top of `taskd.worker`."""

from __future__ import annotations

from taskd.ascend.documented.lazy_import import behind
from taskd.config import environ

WORKER = "taskd.worker.worker_api"
STEPS = {"pt": "taskd.torch.profiling.optimizer_hook", "ms": "taskd.mindspore.callback_hook"}
"""Put a hook where the framework's steps end, when they are loaded."""


def init_taskd_worker(
    rank_id: int, upper_limit_of_disk_in_mb: int = 5000, framework: str = "pt"
) -> bool:
    """Prepare this training process to be profiled, tested and switched to other links.

    False: a number is no number or negative, or the node's rank cannot be told from the
    environment (`framework` is "pt" or "ms").
    """
    from taskd.ascend.toolkit.run_log import run_log

    try:
        rank = _natural("rank_id", rank_id)
        limit_mb = _natural("upper_limit_of_disk_in_mb", upper_limit_of_disk_in_mb)
        node = _node_rank(framework)
    except ValueError as error:
        run_log.error("the worker is not initialised: %s", error)
        return False
    worker = behind(WORKER)
    behind(STEPS[framework])
    return worker is not None and bool(worker.init(rank, node, limit_mb, framework))


def start_taskd_worker() -> bool:
    """Begin, in the background. False: not initialised."""
    worker = behind(WORKER)
    return worker is not None and bool(worker.start())


def destroy_taskd_worker() -> bool:
    """Leave the bus. False: not initialised."""
    worker = behind(WORKER)
    return worker is not None and bool(worker.destroy())


def _natural(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} must be a number from 0 on, got {value!r}")
    return value


def _node_rank(framework: str) -> int:
    """torch's launcher tells the global rank, MindSpore's the node's own."""
    match framework:
        case "ms":
            return _from_environment("MS_NODE_RANK")
        case "pt":
            local = _from_environment("LOCAL_WORLD_SIZE")
            if not local:
                raise ValueError("LOCAL_WORLD_SIZE must not be 0")
            return _from_environment("RANK") // local
        case _:
            raise ValueError(f"framework must be 'pt' or 'ms', got {framework!r}")


def _from_environment(name: str) -> int:
    text = environ.get(name, "")
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"{name} must be a number in the environment, got {text!r}")
    return int(text)
