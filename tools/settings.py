"""Write docs/reference/settings.md from the settings classes of the source.

    python tools/settings.py            write the page
    python tools/settings.py --check    fail if the page is out of date

A settings class is a keyword-only dataclass called …Settings or …Config; the sentence under a field
is its description. The source is parsed, not imported, so this runs without torch and without an
installed TaskD.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
PAGE = ROOT / "docs" / "reference" / "settings.md"

HEAD = """# Settings

Generated from the source by `make settings`: change the sentence under the field, not this page.

- [Environment variables in classes](#environment-variables-in-classes): names, types, defaults.
- [Other environment variables](#other-environment-variables): those that MindCluster, torchrun
  and MindSpore document, and single ones of our own.
- [Set by the program](#set-by-the-program): values from command-line options and API arguments.
"""

VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "The devices of the node. Each worker gets its own.",
    "ELASTIC_GRPC_SECURE_CERTIFICATES_PATH": "The certificate by which `mindx_elastic` "
    "verifies clusterd.",
    "ELASTIC_GRPC_SECURE_CONNECT": "`on`: `mindx_elastic` encrypts its connection to clusterd.",
    "ELASTIC_LOG_PATH": "Directory where `mindx_elastic` writes `run.log`; "
    "`/var/log/mindx-dl/elastic` if unset. If set, TaskD's log lines go there as well.",
    "ELASTIC_PROCESS_RECOVER_ENABLE": "If set to anything but `1`, `mindx_elastic.api` does not "
    "patch torchrun.",
    "ENABLE_RESTART_FAULT_PROCESS": "`on`: MSRunPlugin restarts only the failed ranks.",
    "GROUP_BASE_DIR": "Directory where `parallel_group.json` is written, if it exists.",
    "GROUP_WORLD_SIZE": "How many nodes the job was started with (torchrun).",
    "HCCL_ASYNC_ERROR_HANDLING": "If `1` or unset, HCCL may end a process by itself, and a "
    "warning is logged.",
    "HCCL_CONNECT_TIMEOUT": "Seconds. A pause for a link switch may last 2.5 times as long, at "
    "most 7200 s; 600 s if unset.",
    "HIGH_AVAILABILITY": "Comma-separated list; with `elastic-training` in it mindio_ttp may "
    "shrink the job.",
    "LD_LIBRARY_PATH": "Where TaskD searches for libmspti.",
    "LOCAL_PROXY_ENABLE": "`on`: manager, proxy and clients connect to 127.0.0.1, where a sidecar "
    "encrypts the traffic.",
    "LOCAL_RANK": "The rank of a worker on its node (torchrun).",
    "LOCAL_WORLD_SIZE": "Ranks of the node (torchrun).",
    "MASTER_ADDR": "The address of node 0, for the ranks and the node's proxy.",
    "MASTER_PORT": "The port of the ranks' store.",
    "MINDX_SERVER_IP": "The host of clusterd; its port is 8899.",
    "MINDX_TASK_ID": "The job's name.",
    "MS_LOCAL_WORKER": "Ranks of the node (MindSpore).",
    "MS_NODE_RANK": "The node's rank (MindSpore).",
    "MS_SCHED_HOST": "The host of MindSpore's scheduler and of the manager.",
    "MS_WORKER_NUM": "Ranks of the job (MindSpore).",
    "OMP_NUM_THREADS": "Threads per worker; `1` if unset and the node has several "
    "workers (torchrun).",
    "POD_IP": "The address that the manager listens on; 127.0.0.1 if unset.",
    "POD_NAME": "The pod of a clusterd replica, which it labels while it leads "
    "(`taskd clusterd --cluster kubernetes`).",
    "POD_NAMESPACE": "Where clusterd keeps its records and its Lease in Kubernetes; `mindx-dl` if "
    "unset.",
    "PROCESS_RECOVER": "`on`: process-level recovery is enabled.",
    "RANK": "The rank of a worker (torchrun), or of a node (its agent and proxy).",
    "RANK_TABLE_FILE": "If empty, there is no rank table to wait for.",
    "RESTART_FAULT_PROCESS_TYPE": "`worker`: only this process was restarted, not its node. Set by "
    "the agent.",
    "TASKD_BUS_TOKEN_FILE": "A file with the secrets that nodes present to the manager, one per "
    "line, the newest first; it can be replaced while the job runs.",
    "TASKD_CLUSTERD": "host:port of clusterd, for the `taskd` commands.",
    "TASKD_CLUSTERD_TOKEN": "The token that is sent to clusterd.",
    "TASKD_CLUSTERD_TOKEN_FILE": "A file with the token that is sent to clusterd, read "
    "again for each call.",
    "TASKD_DUMP_DIR": "Directory of emergency checkpoints, where the next start also looks for "
    "one; `taskd-dump` if unset.",
    "TASKD_JOB_ID": "The job's name; MINDX_TASK_ID if unset.",
    "TASKD_LOG_LEVEL": "The lowest level that `python -m taskd.manager` prints.",
    "TASKD_NICS": "The network interfaces for the groups of the ranks, `PRIMARY,BACKUP`; "
    "`taskd run --nics` takes precedence.",
    "TASKD_PRELOAD": "Comma-separated modules that the patched agent of torchrun imports before it "
    "forks workers.",
    "TASKD_PROCESS_ENABLE": "`off`: the manager does not take part in recovery.",
    "TASKD_PROFILING_SWITCH": "The file that switches profiling on and off.",
    "TASKD_REPORT_FAULT_TIMEOUT": "Seconds (300 to 600) that an agent waits for orders after it "
    "has reported a fault. Unset or outside of that range: no limit.",
    "TASKD_DEVICES_FILE": "Set by the agent: the file in which a worker writes which devices it "
    "sees, after its first step.",
    "TASKD_RESULT_FILE": "Set by the agent: the file in which a forked worker writes how its "
    "script ended.",
    "TASKD_START_METHOD": "`spawn`: the patched agent of torchrun does not fork workers.",
    "TASKD_TLS_CA": "The certificate authority for mutual TLS on the bus. Also needed: "
    "TASKD_TLS_SERVER_KEY and TASKD_TLS_SERVER_CRT for the manager, TASKD_TLS_CLIENT_KEY and "
    "TASKD_TLS_CLIENT_CRT for the nodes.",
    "TASKD_TOKEN": "The job's secret.",
    "TORCHELASTIC_ERROR_FILE": "The file where a worker writes its traceback (torchrun).",
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "The prefix of the workers' log lines (torchrun).",
    "TORCHELASTIC_RESTART_COUNT": "How often all ranks have been restarted (torchrun).",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "Comma-separated signals that end the job (torchrun).",
    "TORCHINDUCTOR_CACHE_DIR": "Where torch.compile keeps compiled code; a folder per user in the "
    "directory of temporary files if unset.",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "Seconds that workers have to end after SIGTERM (torchrun).",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "Passed on to workers; `1` if unset (torchrun).",
    "TTP_PORT": "The port of mindio_ttp's controller.",
    "WORLD_SIZE": "Ranks of the job (torchrun).",
    "NO_COLOR": "Not empty: `taskd status --watch` uses no colours.",
    "TERM": "`dumb` or empty: `taskd status --watch` uses no colours.",
    "XDG_RUNTIME_DIR": "The directory through which the commands find running jobs of this user.",
}
"""Descriptions of the variables that the source reads by name."""


@dataclass(frozen=True)
class Field:
    name: str
    kind: str
    default: str
    sentence: str


@dataclass(frozen=True)
class Group:
    name: str
    module: str
    sentence: str
    fields: tuple[Field, ...]

    @property
    def qualified_name(self) -> str:
        return f"{self.module}.{self.name}"


def main() -> int:
    page = render()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page)
        return 0
    if PAGE.exists() and PAGE.read_text() == page:
        return 0
    print("docs/reference/settings.md is out of date: run `make settings`", file=sys.stderr)
    return 1


def render() -> str:
    trees = {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
    groups = [group for path, tree in trees.items() for group in _groups(path, tree)]
    by_name = {group.name: group for group in groups}
    prefixes = dict(found for path, tree in trees.items() for found in _loads(path, tree))
    inner: set[str] = set()
    parts = [HEAD, "## Environment variables in classes\n"]
    for group in groups:
        if (prefix := prefixes.get(group.qualified_name)) is not None:
            parts.append(_section(group, list(_variables(group, prefix, by_name, inner))))
    parts += ["## Other environment variables\n", _others(trees)]
    parts.append("## Set by the program\n")
    parts += [
        _section(group, [(field.name, field) for field in group.fields])
        for group in groups
        if group.qualified_name not in prefixes and group.name not in inner
    ]
    return "\n".join(parts).rstrip("\n") + "\n"


def _groups(path: Path, tree: ast.Module) -> Iterator[Group]:
    if "_pb" in path.parts or path.is_relative_to(SOURCE / "taskd" / "python"):
        return
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and re.search("(Settings|Config)$", node.name):
            if not any("kw_only=True" in ast.unparse(mark) for mark in node.decorator_list):
                continue
            sentence = " ".join((ast.get_docstring(node) or "").split())
            known = dict(_constants({path: tree}))
            yield Group(node.name, _module(path), sentence, tuple(_fields(node, known)))


def _fields(node: ast.ClassDef, known: dict[str, str]) -> Iterator[Field]:
    for item, after in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        sentence = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            sentence = " ".join(str(after.value.value).split())
        default = _default(item.value, known)
        yield Field(item.target.id, ast.unparse(item.annotation), default, sentence)


def _default(value: ast.expr | None, known: dict[str, str]) -> str:
    if value is None:
        return "required"
    text = ast.unparse(value)
    if text in known:
        text = repr(known[text])
    if text.startswith("field("):
        return "see its class"
    return f"`{text}`"


def _module(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


def _loads(path: Path, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The qualified names of the classes that `load` reads, and their prefixes."""
    origins = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for node in ast.walk(tree):
        if (
            not isinstance(node, ast.Call)
            or not node.args
            or not isinstance(node.args[0], ast.Name)
        ):
            continue
        if ast.unparse(node.func) not in ("load", "config.load"):
            continue
        named = {word.arg: word.value for word in node.keywords}
        prefix = named.get("prefix")
        name = node.args[0].id
        qualified_name = f"{origins.get(name) or _module(path)}.{name}"
        yield qualified_name, str(prefix.value) if isinstance(prefix, ast.Constant) else "TASKD"


def _variables(
    group: Group, prefix: str, known: dict[str, Group], inner: set[str]
) -> Iterator[tuple[str, Field]]:
    for field in group.fields:
        name = f"{prefix}_{field.name}".upper()
        if field.kind in known:
            inner.add(field.kind)
            yield from _variables(known[field.kind], name, known, inner)
        else:
            yield name, field


def _section(group: Group, rows: list[tuple[str, Field]]) -> str:
    about = f"`{group.module}`. {group.sentence}".rstrip(". ") + "."
    lines = [f"### {group.name}\n", fill(about, 100) + "\n"]
    lines += ["| name | type | default | |", "|---|---|---|---|"]
    for name, field in rows:
        cells = (f"`{name}`", f"`{field.kind}`", field.default, field.sentence)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*lines, ""])


def _others(trees: dict[Path, ast.Module]) -> str:
    constants = dict(_constants(trees))
    names = {name for tree in trees.values() for name in _read_by_name(tree, constants)}
    lines = ["| name | |", "|---|---|"]
    lines += [f"| `{name}` | {VARIABLES.get(name, '')} |" for name in sorted(names)]
    return "\n".join([*lines, ""])


def _constants(trees: dict[Path, ast.Module]) -> Iterator[tuple[str, str]]:
    for tree in trees.values():
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                for target in node.targets:
                    if isinstance(target, ast.Name) and isinstance(node.value.value, str):
                        yield target.id, node.value.value
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
                names = [name for target in node.targets for name in getattr(target, "elts", [])]
                for name, value in zip(names, node.value.elts, strict=False):
                    if isinstance(value, ast.Constant) and isinstance(value.value, str):
                        yield ast.unparse(name), value.value


def _read_by_name(tree: ast.Module, constants: dict[str, str]) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=owner, attr="get"), args=[key, *_]):
                pass
            case ast.Subscript(value=owner, slice=key, ctx=ast.Load()):
                pass
            case ast.Call(func=ast.Name(id=name), args=[key]) if "environment" in name:
                owner = ast.Name(id="environ")
            case _:
                continue
        if not re.search(r"(^|\.)environ(ment)?$", ast.unparse(owner)):
            continue
        match key:
            case ast.Constant(value=str(name)):
                yield name
            case ast.Attribute(attr=name) | ast.Name(id=name) if name in constants:
                yield constants[name]


if __name__ == "__main__":
    sys.exit(main())
