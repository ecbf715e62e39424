"""The arguments of `taskd run`: torchrun's, and our own.

The table repeats torchrun's: to import torch only to parse a command line would take longer than
everything else at the start. A test compares the two tables, so that they stay equal.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from taskd.config import environ

FORK, SPAWN = "fork", "spawn"


class FromEnvironment(argparse.Action):
    """As in torchrun, `PET_<NAME>` is an option's default; also of our own options with a text."""

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


_STREAMS = "0: none, 1: stdout, 2: stderr, 3: both; per local rank: 0:1,1:2"
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
_TORCHRUN: tuple[tuple[str, object, str], ...] = (
    ("--nnodes", "1:1", "number of nodes, or MIN:MAX: the job starts with MAX nodes"),
    ("--nproc-per-node", "1", "workers per node: a number, auto, cpu, gpu or xpu"),
    ("--rdzv-backend", "static", "static: nodes are given their ranks; c10d: nodes draw them"),
    ("--rdzv-endpoint", "", "HOST:PORT of the first node"),
    ("--rdzv-id", "none", "name of the job"),
    ("--rdzv-conf", "", "KEY=VALUE,…; keys: timeout, join_timeout, is_host"),
    ("--max-restarts", None, "how often all ranks may be restarted; default: no limit; 0: never"),
    ("--monitor-interval", 0.1, "ignored: exits are noticed at once"),
    ("--event-log-handler", "null", "where torchelastic's events go: null or console"),
    ("--role", "default", "role name of the workers"),
    ("--log-dir", None, "directory for log and error files"),
    ("--redirects", "0", f"streams that go to files; {_STREAMS}"),
    ("--tee", "0", f"streams that go to files and to the console; {_STREAMS}"),
    (
        "--log-line-prefix-template",
        "",
        "prefix of a worker's lines on the console, with ${role_name}, ${local_rank}, ${rank} "
        "and ${hostname}",
    ),
    ("--local-ranks-filter", "", "local ranks shown on the console, such as 0,1; default: all"),
    ("--duplicate-stdout-filters", [], "also collect the stdout lines with one of these words"),
    ("--duplicate-stderr-filters", [], "also collect the stderr lines with one of these words"),
    ("--node-rank", 0, "rank of this node; with c10d, give it to all nodes or to none"),
    ("--master-addr", "127.0.0.1", "address of the first node"),
    (
        "--master-port",
        None,
        "port of the store there; default: a free one (29500 with several nodes)",
    ),
    (
        "--local-addr",
        None,
        "name of this machine when nodes draw ranks, and with --etcd its address for other nodes; "
        "default: its host name",
    ),
    ("--signals-to-handle", _SIGNALS, "signals that stop the job, separated by commas"),
    ("--shutdown-timeout", None, "seconds from SIGTERM to SIGKILL for the workers; default: 30"),
)
_TYPES: dict[str, Callable[[str], Any]] = {
    "--max-restarts": int,
    "--monitor-interval": float,
    "--duplicate-stdout-filters": _words,
    "--duplicate-stderr-filters": _words,
    "--node-rank": int,
    "--master-port": int,
    "--shutdown-timeout": int,
}
_TORCHRUN_FLAGS = (
    ("--standalone", "run on this node only, with any free port"),
    ("--no-python", "the program is not a Python script"),
    ("--run-path", "accepted for compatibility: forked workers always run the script this way"),
    ("--virtual-local-rank", "every worker sees only its own device, with local rank 0"),
    ("--module", "run a module, as `python -m` does"),
)
_SHORT = {"--redirects": "-r", "--tee": "-t", "--module": "-m"}
_START_METHOD = (
    "fork: workers are forked from a process that has already imported torch (fast); "
    "spawn, forkserver: every worker is a new process, for scripts that cannot be forked"
)
_UNSUPPORTED = (
    ("--logs-specs", "not supported: use --log-dir and --redirects"),
    ("--numa-binding", "not supported: use numactl"),
)
_OURS: tuple[tuple[str, str, Any, str], ...] = (
    (
        "--strategies",
        "NAME,…",
        "",
        "allowed strategies after a fault, such as retry,dump; default: all",
    ),
    (
        "--clusterd",
        "HOST:PORT",
        "",
        "clusterd, or several with commas; default: one inside the manager",
    ),
    (
        "--etcd",
        "HOST:PORT,…",
        "",
        "etcd that keeps the job's state: then any node may be lost, even node 0; own: the job "
        "starts one; none: node 0 keeps the state; default: own, if three nodes or more can do it",
    ),
    ("--preload", "MODULE,…", [], "import these modules once, before workers are forked"),
    ("--job-id", "NAME", "", "name of the job; default: the value of --rdzv-id"),
    (
        "--manager-port",
        "PORT",
        0,
        "port of the manager; default: a free one (9601 with several nodes)",
    ),
    ("--join-timeout", "SECONDS", 0.0, "how long to wait until all nodes join; default: 900"),
    ("--nics", "PRIMARY,BACKUP", "", "network interfaces for the ranks' process groups"),
    ("--metrics", "HOST:PORT", "", "address where the manager serves Prometheus metrics"),
    (
        "--otlp",
        "URL",
        "",
        "send each incident to this OpenTelemetry collector, such as http://host:4318",
    ),
    ("--state-dir", "FOLDER", "", "folder for the journal, for `taskd replay`"),
    (
        "--checkpoint-every",
        "STEPS",
        0,
        "write a checkpoint to the folder of --dump-dir every STEPS steps, while training "
        "continues; for scripts that use taskd.torch; default: none",
    ),
)
DASHBOARD = "--dashboard"
DASHBOARD_LISTEN = "127.0.0.1:0"
"""Where `--dashboard` without a value serves the page."""
_OUR_FLAGS = (
    (
        "--spare",
        "this node is a spare: it takes over the ranks of a lost node; give a second spare "
        "--node-rank NNODES+1",
    ),
    (
        "--witness",
        "a machine that only helps to decide which nodes are lost: it has no ranks",
    ),
    ("--precheck", "stress-test every rank and link after the first step of all ranks"),
    (
        "--insecure",
        "start several nodes without TASKD_TOKEN: any process that reaches a port can join the job",
    ),
    ("--encrypt-state", "encrypt the state that ranks send each other; needs `taskd[secure]`"),
    ("--nic-failover", "switch to the backup interface if no group forms over the primary"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_torchruns(parser.add_argument_group("options of torchrun"))
    _add_ours(parser.add_argument_group("options of TaskD"))
    script = "script, module (-m) or program (--no-python) to run"
    parser.add_argument("training_script", help=script)
    rest = argparse.REMAINDER
    parser.add_argument("training_script_args", nargs=rest, help="arguments of the script")


def normalized(words: Sequence[str]) -> list[str]:
    """`--dashboard train.py` means the default address: its value is optional.

    Only our own options are changed: the first word that is neither an option nor its value is the
    script, and everything behind it belongs to the script.
    """
    flags = {name for names, _ in (*_TORCHRUN_FLAGS, *_OUR_FLAGS) for name in _spellings(names)}
    found, at = list(words), 0
    while at < len(found) and found[at].startswith("-") and found[at] != "--":
        follows = found[at + 1] if at + 1 < len(found) else ""
        if found[at] == DASHBOARD and not _is_address(follows):
            found[at] = f"{DASHBOARD}={DASHBOARD_LISTEN}"
        has_value = "=" not in found[at] and found[at] not in flags
        at += 2 if has_value else 1
    return found


def _is_address(word: str) -> bool:
    host, _, port = word.rpartition(":")
    return bool(host) and port.isdecimal()


def _add_torchruns(group: argparse._ArgumentGroup) -> None:
    for name, default, text in _TORCHRUN:
        group.add_argument(
            *_spellings(name),
            action=FromEnvironment,
            type=_TYPES.get(name, str),
            default=default,
            help=text,
        )
    for name, text in _TORCHRUN_FLAGS:
        group.add_argument(*_spellings(name), action=Flag, help=text)
    group.add_argument(
        *_spellings("--start-method"),
        action=FromEnvironment,
        default=FORK,
        choices=[SPAWN, FORK, "forkserver"],
        help=_START_METHOD,
    )
    for name, text in _UNSUPPORTED:
        group.add_argument(*_spellings(name), default=None, help=text)


def _add_ours(group: argparse._ArgumentGroup) -> None:
    for name, metavar, default, text in _OURS:
        if isinstance(default, list):
            group.add_argument(name, metavar=metavar, default=[], action="append", help=text)
        elif isinstance(default, str):
            group.add_argument(
                name, action=FromEnvironment, metavar=metavar, default=default, help=text
            )
        else:  # a number: without the option, the default depends on other options
            kind = type(default)
            group.add_argument(name, metavar=metavar, default=None, type=kind, help=text)
    for name, text in _OUR_FLAGS:
        group.add_argument(name, action="store_true", help=text)
    text = f"serve a page about the job on node 0 (default: {DASHBOARD_LISTEN}, any free port)"
    group.add_argument(
        DASHBOARD, metavar="HOST:PORT", nargs="?", default="", const=DASHBOARD_LISTEN, help=text
    )
    dump_dir = environ.get("TASKD_DUMP_DIR", "taskd-dump")
    text = "folder for checkpoints of TaskD, from which the next start continues"
    group.add_argument("--dump-dir", metavar="FOLDER", default=dump_dir, help=text)


def _spellings(name: str) -> list[str]:
    """The short form if there is one, then with dashes, then with underscores."""
    names = [_SHORT[name]] if name in _SHORT else []
    return list(dict.fromkeys([*names, name, "--" + name[2:].replace("-", "_")]))
