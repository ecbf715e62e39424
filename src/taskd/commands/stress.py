"""`taskd stress JOB`: pauses training, tests devices and links, resumes.

The exit code is 2 if a test fails.
"""

from __future__ import annotations

import argparse
import sys

from taskd.commands import render
from taskd.commands.connection import add_server_arguments, connection
from taskd.errors import SettingsError
from taskd.model.operations import NOT_RUN, OPS, PASSED
from taskd.wire._pb import recover_pb2 as pb
from taskd.wire.json_reading import loads

ALL = "all"
FOUND_A_FAULT = 2
NAMES = {str(op): name for name, op in OPS.items()}
VERDICTS = {"0": "passed", "1": "not run", "2": "FAULT", "3": "TIMEOUT", "4": "UNSETTLED"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", help="id of the job")
    parser.add_argument(
        "--nodes", default=ALL, help="comma-separated node names, or `all` (default)"
    )
    parser.add_argument(
        "--ops",
        default=",".join(OPS),
        help=f"comma-separated list: {', '.join(OPS)} (default: all)",
    )
    add_server_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    request = request_of(arguments.job, arguments.nodes, arguments.ops)
    with connection(arguments, arguments.job) as server:
        server.start_operation("StressTest", request)
        sys.stdout.write(f"job {arguments.job} is paused for the stress test\n")
        sys.stdout.flush()
        text = server.operation_result(
            "SubscribeStressTestResponse", pb.StressTestRequest(jobID=arguments.job)
        )
    verdict, _, results = text.partition("result:")
    sys.stdout.write(f"{verdict.rstrip(' ,')}\n")
    rows = rows_of(results)
    if rows:
        sys.stdout.write(render.table(("NODE", "DEVICE", "TEST", "RESULT", "FOUND"), rows) + "\n")
    tolerated = {VERDICTS[PASSED], VERDICTS[NOT_RUN]}
    good = text.startswith("stress test finish") and all(row[3] in tolerated for row in rows)
    return 0 if good else FOUND_A_FAULT


def request_of(job: str, nodes: str, ops: str) -> pb.StressTestParam:
    tests = [word.strip() for word in ops.split(",") if word.strip()]
    expected = " or ".join(OPS)
    problems = [f"--ops: unknown test {w!r} (expected {expected})" for w in tests if w not in OPS]
    if not tests:
        problems.append(f"--ops: no test given (expected {expected})")
    if len(set(tests)) < len(tests):
        problems.append("--ops: a test is given twice")
    names = [word.strip() for word in nodes.split(",") if word.strip()]
    if not names:
        problems.append("--nodes: no node given")
    if problems:
        raise SettingsError(problems)
    numbers = sorted(OPS[word] for word in tests)
    if names == [ALL]:
        return pb.StressTestParam(jobID=job, allNodesOps=numbers)
    ops_of_node = {name: pb.StressOpList(ops=numbers) for name in names}
    return pb.StressTestParam(jobID=job, stressParam=ops_of_node)


def rows_of(text: str) -> list[tuple[str, str, str, str, str]]:
    """One row per test, from clusterd's JSON; no rows if it is not such JSON."""
    try:
        results_of = loads(text)
        return [
            (
                node,
                device,
                NAMES.get(op, op),
                VERDICTS.get(item["code"], item["code"]),
                item["result"],
            )
            for node, devices in sorted(results_of.items())
            for device, results in sorted(devices.items())
            for op, item in sorted(results["rankResult"].items())
        ]
    except (AttributeError, KeyError, TypeError, ValueError):
        return []
