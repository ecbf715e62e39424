"""The arguments of `taskd run`: torchrun's, and our own.

The table repeats torchrun's: to import torch only to parse a command line would take longer than
everything else at the start. A test compares the two tables, so that they stay equal.
"""

from __future__ import annotations

import argparse
from typing import Any

from taskd.config import environ

FORK, SPAWN = "fork", "spawn"


class FromEnvironment(argparse.Action):
    """As in torchrun, `PET_<NAME>` is an option's default."""

    def __init__(self, dest: str, default: object = None, **options: Any) -> None:
        default = environ.get(f"PET_{dest.upper()}", default)
        super().__init__(dest=dest, default=default, **options)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, values)
        namespace.given = {*getattr(namespace, "given", ()), self.dest}


class Flag(FromEnvironment):
    """An option without a value; `PET_<NAME>=1` sets it too."""

    def __init__(self, dest: str, **options: Any) -> None:
        super().__init__(dest=dest, default="0", nargs=0, const=True, **options)
        self.default = bool(int(str(self.default)))

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, True)


def _words(text: str) -> list[str]:
    """Separated by commas; a double comma means one comma inside a word."""
    return [word.replace("\0", ",") for word in text.replace(",,", "\0").split(",")]


_OPTIONS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("--nnodes", {"default": "1:1"}, "number of nodes, or MIN:MAX: the job starts with MAX nodes"),
    ("--nproc-per-node", {"default": "1"}, "workers per node: a number, auto, cpu, gpu or xpu"),
    (
        "--rdzv-backend",
        {"default": "static"},
        "static (every node is given its rank) or c10d (nodes draw their ranks)",
    ),
    ("--rdzv-endpoint", {"default": ""}, "HOST:PORT of the first node"),
    ("--rdzv-id", {"default": "none"}, "name of the job"),
    ("--rdzv-conf", {"default": ""}, "KEY=VALUE,…; keys: timeout, join_timeout, is_host"),
    (
        "--max-restarts",
        {"type": int, "default": 0},
        "how often all ranks may be restarted; 0: no limit",
    ),
    ("--monitor-interval", {"type": float, "default": 0.1}, "ignored: exits are noticed at once"),
    ("--event-log-handler", {"default": "null"}, "where torchelastic's events go: null or console"),
    ("--role", {"default": "default"}, "role name of the workers"),
    ("--log-dir", {"default": None}, "directory for log and error files"),
    (
        "--redirects",
        {"default": "0"},
        "streams that go to files: 0 none, 1 stdout, 2 stderr, 3 both; per rank: 0:1,1:2",
    ),
    (
        "--tee",
        {"default": "0"},
        "streams that go to files and to the console; values as for --redirects",
    ),
    (
        "--local-ranks-filter",
        {"default": ""},
        "local ranks whose output is shown on the console, such as 0,1; default: all",
    ),
    (
        "--duplicate-stdout-filters",
        {"type": _words, "default": []},
        "also collect the stdout lines that contain one of these words",
    ),
    (
        "--duplicate-stderr-filters",
        {"type": _words, "default": []},
        "also collect the stderr lines that contain one of these words",
    ),
    (
        "--node-rank",
        {"type": int, "default": 0},
        "rank of this node; with c10d, give it to all nodes or to none",
    ),
    ("--master-addr", {"default": "127.0.0.1"}, "address of the first node"),
    (
        "--master-port",
        {"type": int, "default": None},
        "port of the store on the first node; default: any free port, or 29500 if there are "
        "several nodes",
    ),
    (
        "--local-addr",
        {"default": None},
        "name of this machine when nodes draw their ranks (c10d); default: its host name",
    ),
    (
        "--signals-to-handle",
        {"default": "SIGTERM,SIGINT,SIGHUP,SIGQUIT"},
        "signals that stop the job, separated by commas",
    ),
    (
        "--shutdown-timeout",
        {"type": int, "default": None},
        "seconds between SIGTERM and SIGKILL when workers are stopped; default: 30",
    ),
)
_FLAGS = (
    ("--standalone", "run on this node only, with any free port"),
    ("--no-python", "the program is not a Python script"),
    (
        "--run-path",
        "accepted for compatibility: forked workers always run the script in their own process",
    ),
    (
        "--virtual-local-rank",
        "every worker sees only its own device, as device 0, and LOCAL_RANK is 0",
    ),
)
_SHORT = {"--redirects": "-r", "--tee": "-t"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_torchruns(parser.add_argument_group("options of torchrun"))
    _add_ours(parser.add_argument_group("options of TaskD"))
    parser.add_argument(
        "training_script", help="script, module (-m) or program (--no-python) to run"
    )
    parser.add_argument(
        "training_script_args", nargs=argparse.REMAINDER, help="arguments of the script"
    )


def _add_torchruns(group: argparse._ArgumentGroup) -> None:
    for name, options, text in _OPTIONS:
        names = _spellings(name)
        if name in _SHORT:
            names.insert(0, _SHORT[name])
        group.add_argument(*names, action=FromEnvironment, help=text, **options)
    for name, text in _FLAGS:
        group.add_argument(*_spellings(name), action=Flag, help=text)
    group.add_argument("-m", "--module", action=Flag, help="run a module, as `python -m` does")
    group.add_argument(
        *_spellings("--start-method"),
        action=FromEnvironment,
        default=FORK,
        choices=[SPAWN, FORK, "forkserver"],
        help="fork: workers are forked from a process that has already imported torch (fast); "
        "spawn, forkserver: every worker is a new process, for scripts that cannot be forked",
    )
    group.add_argument(
        *_spellings("--logs-specs"),
        default=None,
        help="not supported: use --log-dir and --redirects",
    )
    group.add_argument(
        *_spellings("--numa-binding"), default=None, help="not supported: use numactl"
    )


def _add_ours(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--strategies",
        default="",
        metavar="NAME,…",
        help="allowed reactions to a fault, such as retry,recover-in-place,dump; default: all",
    )
    group.add_argument(
        "--clusterd",
        default="",
        metavar="HOST:PORT",
        help="address of clusterd; default: one inside the manager",
    )
    group.add_argument(
        "--spare",
        action="store_true",
        help="start a spare node, which takes over the ranks of a lost node; give the second spare "
        "--node-rank NNODES+1, and so on",
    )
    group.add_argument(
        "--preload",
        action="append",
        default=[],
        metavar="MODULE",
        help="import this module once, before workers are forked; may be repeated",
    )
    group.add_argument(
        "--job-id", default="", help="name of the job; default: the value of --rdzv-id"
    )
    group.add_argument(
        "--manager-port",
        type=int,
        default=None,
        help="port of the manager on the first node; default: any free port, or 9601 if there are "
        "several nodes",
    )
    group.add_argument(
        "--join-timeout",
        type=float,
        default=None,
        help="seconds to wait until all nodes have joined; default: 900",
    )
    group.add_argument(
        "--precheck",
        action="store_true",
        help="stress-test every rank and link after all ranks have done their first step",
    )
    group.add_argument(
        "--nics",
        default="",
        metavar="PRIMARY,BACKUP",
        help="network interfaces for the ranks' process groups",
    )
    group.add_argument(
        "--nic-failover",
        action="store_true",
        help="switch to the backup interface when no group can be formed over the primary",
    )
    group.add_argument(
        "--metrics",
        default="",
        metavar="HOST:PORT",
        help="address where the manager serves Prometheus metrics",
    )
    group.add_argument(
        "--dump-dir",
        default=environ.get("TASKD_DUMP_DIR", "taskd-dump"),
        help="directory for emergency checkpoints, from which the next start continues",
    )
    group.add_argument(
        "--state-dir", default="", help="directory for the journal, for `taskd replay`"
    )


def _spellings(name: str) -> list[str]:
    underscored = "--" + name[2:].replace("-", "_")
    return [name] if underscored == name else [name, underscored]
