"""The `taskd` command. The module of a subcommand is imported only when it is used.

Such a module has `add_arguments(parser)` and `run(arguments) -> exit code`; it may have
`normalized(words) -> words`, for a command line that argparse alone would misunderstand.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from taskd.errors import TaskdError
from taskd.version import __version__


@dataclass(frozen=True, slots=True)
class Command:
    module: str
    help: str


COMMANDS = {
    "run": Command(
        "taskd.agent.run.run_command",
        "run a training script like torchrun, and keep it training through faults",
    ),
    "clusterd": Command(
        "taskd.clusterd.clusterd_command", "serve many jobs: decide how each one recovers"
    ),
    "status": Command("taskd.commands.status", "show the state of a job"),
    "jobs": Command("taskd.commands.jobs", "list the jobs of a server"),
    "replay": Command(
        "taskd.commands.replay", "show every incident of a job, with the reason of each decision"
    ),
    "dashboard": Command(
        "taskd.dashboard.dashboard_command", "show jobs in a browser: progress, incidents, nodes"
    ),
    "fault": Command("taskd.commands.fault", "report a fault by hand"),
    "profile": Command("taskd.commands.profile", "start or stop recording a running job"),
    "trace": Command(
        "taskd.commands.trace", "merge the records of all ranks into one file for Perfetto"
    ),
    "stress": Command("taskd.commands.stress", "pause a job and test its devices and links"),
    "nic": Command(
        "taskd.commands.nic", "move ranks of a running job to their other network interface"
    ),
    "completion": Command(
        "taskd.completion", "print a script for bash, zsh or fish that completes commands"
    ),
    "doctor": Command("taskd.doctor", "check what works on this machine, what does not, and why"),
}


def main(argv: Sequence[str] | None = None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="taskd", description="Keeps distributed training jobs training through faults."
    )
    parser.add_argument("--version", action="version", version=f"taskd {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    named = next((word for word in args if not word.startswith("-")), None)
    module: Any = None
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=command.help, description=command.help)
        if name == named:
            module = import_module(command.module)
            module.add_arguments(subparser)
            if hasattr(module, "normalized"):
                at = args.index(name) + 1
                args = [*args[:at], *module.normalized(args[at:])]
    arguments = parser.parse_args(args)
    try:
        return int(module.run(arguments))
    except TaskdError as error:
        print(f"taskd {named}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
