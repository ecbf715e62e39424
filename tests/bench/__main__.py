"""`make bench`: runs every benchmark, prints ratios, and rewrites docs/benchmarks.md.

python -m tests.bench                 all of them
python -m tests.bench bus torch_step  only these; the other sections of the page stay
"""

from __future__ import annotations

import os
import platform
import re
import sys
from importlib import import_module

import torch

from tests import ROOT
from tests.bench.rows import Row

PAGE = ROOT / "docs/benchmarks.md"
BENCHES = {
    "bus": "The bus",
    "clusterd": "clusterd",
    "kubernetes": "clusterd on Kubernetes",
    "own_etcd": "A job with an etcd of its own",
    "launch": "Launch and restart",
    "torch_step": "Protection when nothing fails",
    "state": "State that ranks send each other",
    "flood": "Under a flood of strangers: clusterd",
    "flood_job": "Under a flood of strangers: a job that trains",
    "verify": "Verified gradients",
    "profiling": "Profiling",
    "dashboard": "The dashboard",
    "recovery": "Recovery, against peers",
    "kills": "Twenty kills",
    "node_zero": "Loss of node 0, with etcd",
    "reconfigure": "Groups formed again, against torch's own reconfiguration",
    "compiled": "Recovery with torch.compile",
    "trainers": "Trainers of other frameworks",
    "gpu": "On a GPU",
}
HEAD = """# Benchmarks

Written by `make bench`; do not edit. Every row compares two things measured in the same run on the
same machine. The machine is small and noisy, so read the ratios, not the milliseconds.
"""


def main(names: list[str]) -> int:
    sections = _sections(PAGE.read_text()) if PAGE.exists() else {}
    missed = 0
    for name in names or [one for one in BENCHES if one != "gpu" or torch.cuda.is_available()]:
        bench = import_module(f"tests.bench.{name}")
        rows = bench.measure()
        if not rows:
            print(f"\n{BENCHES[name]}: not on this machine with torch {torch.__version__}")
            continue
        sections[name] = _table(rows) + getattr(bench, "NOTES", "")
        print(f"\n{BENCHES[name]}\n{sections[name]}", flush=True)
        missed += sum(row.met is False for row in rows)
        known = [_section(key, sections[key]) for key in BENCHES if key in sections]
        PAGE.write_text(HEAD + "".join(known))
    print(f"\n{missed} targets missed" if missed else "\nall targets met")
    return 0


def _section(name: str, table: str) -> str:
    return f"\n<!-- {name} -->\n## {BENCHES[name]}\n\n{table}"


def _sections(page: str) -> dict[str, str]:
    found = re.split(r"\n<!-- (\w+) -->\n## .*\n\n", page)
    return dict(zip(found[1::2], found[2::2], strict=True))


def _table(rows: list[Row]) -> str:
    device = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    lines = [
        f"Measured with {os.cpu_count()} cores{device}, Python {platform.python_version()}, "
        f"torch {torch.__version__.split('+')[0]}.\n",
        "| what | ours | against | ratio | target | met |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        sign = "≥" if row.at_least else "≤"
        target = "" if row.target is None else f"{sign} {row.target:g}"
        met = {True: "yes", False: "**no**", None: ""}[row.met]
        lines.append(f"| {row.what} | {row.ours} | {row.against} | {ratio} | {target} | {met} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
