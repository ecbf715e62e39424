"""`taskd stress JOB`: pause training, test devices and links, go on; 2 when a fault is found."""

from __future__ import annotations

import argparse
import json
import sys

from taskd.commands import operate
from taskd.commands import render as show
from taskd.commands.connection import add_server_arguments, connection
from taskd.errors import SettingsError
from taskd.model.operations import NOT_RUN, OPS, PASSED
from taskd.wire._pb import recover_pb2 as pb

ALL = "all"
FOUND_A_FAULT = 2
NAMES = {str(op): name for name, op in OPS.items()}
VERDICTS = {"0": "passed", "1": "not run", "2": "FAULT", "3": "TIMEOUT", "4": "UNSETTLED"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job")
    parser.add_argument("--nodes", default=ALL, help="comma list of names, or `all`")
    parser.add_argument("--ops", default=",".join(OPS), help=f"comma list of {', '.join(OPS)}")
    add_server_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    request = request_of(arguments.job, arguments.nodes, arguments.ops)
    with connection(arguments, arguments.job) as server:
        operate.ask(server, "StressTest", request)
        sys.stdout.write(f"{arguments.job} pauses and tests itself\n")
        sys.stdout.flush()
        text = operate.outcome(
            server, "SubscribeStressTestResponse", pb.StressTestRequest(jobID=arguments.job)
        )
    verdict, _, table = text.partition("result:")
    sys.stdout.write(f"{verdict.rstrip(' ,')}\n")
    rows = rows_of(table)
    if rows:
        sys.stdout.write(show.table(("NODE", "DEVICE", "TEST", "RESULT", "FOUND"), rows) + "\n")
    tolerated = {VERDICTS[PASSED], VERDICTS[NOT_RUN]}
    good = text.startswith("stress test finish") and all(row[3] in tolerated for row in rows)
    return 0 if good else FOUND_A_FAULT


def request_of(job: str, nodes: str, ops: str) -> pb.StressTestParam:
    wanted = [word.strip() for word in ops.split(",") if word.strip()]
    problems = [f"--ops: {w!r} is none of {', '.join(OPS)}" for w in wanted if w not in OPS]
    if not wanted:
        problems.append("--ops: no test is named")
    if len(set(wanted)) < len(wanted):
        problems.append("--ops: a test is named twice")
    named = [word.strip() for word in nodes.split(",") if word.strip()]
    if not named:
        problems.append("--nodes: no node is named")
    if problems:
        raise SettingsError(problems)
    numbers = sorted(OPS[word] for word in wanted)
    if named == [ALL]:
        return pb.StressTestParam(jobID=job, allNodesOps=numbers)
    listed = {name: pb.StressOpList(ops=numbers) for name in named}
    return pb.StressTestParam(jobID=job, stressParam=listed)


def rows_of(table: str) -> list[tuple[str, str, str, str, str]]:
    """clusterd's own JSON; whatever is no such thing has no rows."""
    try:
        told = json.loads(table)
        return [
            (
                node,
                device,
                NAMES.get(op, op),
                VERDICTS.get(item["code"], item["code"]),
                item["result"],
            )
            for node, devices in sorted(told.items())
            for device, results in sorted(devices.items())
            for op, item in sorted(results.items())
        ]
    except (AttributeError, KeyError, TypeError, ValueError):
        return []
