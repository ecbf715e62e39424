"""The `taskd` command. Each subcommand lives in the package it belongs to, and is loaded on use.

A subcommand's module offers `add_arguments(parser)` and `run(arguments) -> exit code`.
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
        "taskd.agent.run.command", "run a training script, as torchrun does, and keep it running"
    ),
    "clusterd": Command("taskd.clusterd.clusterd_command", "the server that decides for all jobs"),
    "status": Command("taskd.commands.status", "how a job is doing"),
    "jobs": Command("taskd.commands.jobs", "all jobs of a server"),
    "replay": Command("taskd.commands.replay", "every incident of a job, retold"),
    "fault": Command("taskd.commands.fault", "report a fault by hand"),
    "profile": Command("taskd.commands.profile", "record a running job, or stop that"),
    "trace": Command("taskd.commands.trace", "all recorded ranks in one file for Perfetto"),
    "stress": Command("taskd.commands.stress", "test a running job's devices and links"),
    "nic": Command("taskd.commands.nic", "move ranks of a running job to other interfaces"),
    "doctor": Command("taskd.doctor", "what works on this machine, what will not, and why"),
}


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="taskd", description="Keeps a distributed training job training."
    )
    parser.add_argument("--version", action="version", version=f"taskd {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    named = next((word for word in words if not word.startswith("-")), None)
    module: Any = None
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=command.help, description=command.help)
        if name == named:
            module = import_module(command.module)
            module.add_arguments(subparser)
    arguments = parser.parse_args(words)
    try:
        return int(module.run(arguments))
    except TaskdError as error:
        print(f"taskd {named}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
