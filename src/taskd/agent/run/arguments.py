"""torchrun's arguments, and ours, for `taskd run`.

The table repeats torchrun's: importing torch only to parse a command line would cost more than
the whole rest of the start. A test compares the two, so that they cannot drift apart unseen.
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
    """Separated by commas; a doubled comma stands for itself."""
    return [word.replace("\0", ",") for word in text.replace(",,", "\0").split(",")]


_OPTIONS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("--nnodes", {"default": "1:1"}, "number of nodes; of MIN:MAX the job starts with MAX"),
    ("--nproc-per-node", {"default": "1"}, "workers a node: a number, auto, cpu, gpu or xpu"),
    ("--rdzv-backend", {"default": "static"}, "static, or c10d: the nodes draw their ranks"),
    ("--rdzv-endpoint", {"default": ""}, "host:port of the first node"),
    ("--rdzv-id", {"default": "none"}, "a name for the job"),
    ("--rdzv-conf", {"default": ""}, "key=value,…: timeout, join_timeout, is_host"),
    ("--max-restarts", {"type": int, "default": 0}, "restarts of all ranks; 0: no limit"),
    ("--monitor-interval", {"type": float, "default": 0.1}, "unused: deaths are seen at once"),
    ("--event-log-handler", {"default": "null"}, "null or console"),
    ("--role", {"default": "default"}, "a name for the workers' role"),
    ("--log-dir", {"default": None}, "where log and error files go"),
    ("--redirects", {"default": "0"}, "std streams that go to files, e.g. 3 or 0:1,1:2"),
    ("--tee", {"default": "0"}, "std streams that go to files and to the console"),
    ("--local-ranks-filter", {"default": ""}, "the local ranks shown on the console"),
    ("--duplicate-stdout-filters", {"type": _words, "default": []}, "words to collect lines by"),
    ("--duplicate-stderr-filters", {"type": _words, "default": []}, "words to collect lines by"),
    (
        "--node-rank",
        {"type": int, "default": 0},
        "which of the nodes this is; all or none with c10d",
    ),
    ("--master-addr", {"default": "127.0.0.1"}, "the first node"),
    (
        "--master-port",
        {"type": int, "default": None},
        "the store's port there; 29500 for several nodes",
    ),
    ("--local-addr", {"default": None}, "this machine's name where c10d hands out ranks"),
    (
        "--signals-to-handle",
        {"default": "SIGTERM,SIGINT,SIGHUP,SIGQUIT"},
        "signals that stop the job",
    ),
    ("--shutdown-timeout", {"type": int, "default": None}, "seconds from SIGTERM to SIGKILL"),
)
_FLAGS = (
    ("--standalone", "one node, any free port"),
    ("--no-python", "the program is no Python script"),
    ("--run-path", "run the script in the process that was forked, which we always do"),
    ("--virtual-local-rank", "every worker sees its own device as device 0"),
)
_SHORT = {"--redirects": "-r", "--tee": "-t"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_torchruns(parser.add_argument_group("as for torchrun"))
    _add_ours(parser.add_argument_group("TaskD's own"))
    parser.add_argument("training_script", help="the script, module or program")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="its arguments")


def _add_torchruns(group: argparse._ArgumentGroup) -> None:
    for name, options, text in _OPTIONS:
        names = _spellings(name)
        if name in _SHORT:
            names.insert(0, _SHORT[name])
        group.add_argument(*names, action=FromEnvironment, help=text, **options)
    for name, text in _FLAGS:
        group.add_argument(*_spellings(name), action=Flag, help=text)
    group.add_argument("-m", "--module", action=Flag, help="as in `python -m`")
    group.add_argument(
        *_spellings("--start-method"),
        action=FromEnvironment,
        default=FORK,
        choices=[SPAWN, FORK, "forkserver"],
        help="fork: from a process that has torch already; others: for scripts that cannot bear it",
    )
    group.add_argument(*_spellings("--logs-specs"), default=None, help="not supported")
    group.add_argument(*_spellings("--numa-binding"), default=None, help="not supported")


def _add_ours(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--strategies",
        default="",
        help="what may be done about a fault, e.g. retry,recover-in-place,dump",
    )
    group.add_argument("--clusterd", default="", metavar="HOST:PORT", help="use this server")
    group.add_argument(
        "--spare",
        action="store_true",
        help="a node that takes over the ranks of a lost one; further spares count --node-rank on",
    )
    group.add_argument("--preload", action="append", default=[], help="a module to import once")
    group.add_argument("--job-id", default="", help="a name for the job, if not by --rdzv-id")
    group.add_argument(
        "--manager-port",
        type=int,
        default=None,
        help="the manager's port on the first node; 9601 for several nodes",
    )
    group.add_argument(
        "--join-timeout", type=float, default=None, help="seconds a node may take to join: 900"
    )
    group.add_argument(
        "--precheck",
        action="store_true",
        help="stress-test every rank and link once each has done a step",
    )
    group.add_argument(
        "--nics", default="", metavar="PRIMARY,BACKUP", help="interfaces for the ranks' groups"
    )
    group.add_argument(
        "--nic-failover",
        action="store_true",
        help="move to the backup when no groups can be formed over the primary",
    )
    group.add_argument(
        "--metrics", default="", metavar="HOST:PORT", help="the manager serves Prometheus here"
    )
    group.add_argument(
        "--dump-dir",
        default=environ.get("TASKD_DUMP_DIR", "taskd-dump"),
        help="where survivors leave a checkpoint that the next start goes on from",
    )
    group.add_argument(
        "--state-dir", default="", help="where the journal is kept, for `taskd replay`"
    )


def _spellings(name: str) -> list[str]:
    underscored = "--" + name[2:].replace("-", "_")
    return [name] if underscored == name else [name, underscored]
