"""Runs the user's program in a forked process just as `python` would run it.

The zygote (`zygote.py`) forks, and the child calls `run`. The script becomes `__main__`, with the
argv, the `sys.path` and the exit code that it would have in a new process.
"""

from __future__ import annotations

import atexit
import gc
import io
import json
import os
import runpy
import signal
import sys
import traceback
import types
import warnings
import zipfile
from dataclasses import dataclass

from taskd import config
from taskd.agent import script_result
from taskd.agent.script_result import ScriptResult
from taskd.runtime import clock

NANOBIND = "nb_meta"
"""The type of nanobind's types."""

_read_ahead: tuple[bytes, types.CodeType] | None = None
"""The source of the script, and the code that it becomes."""


@dataclass(frozen=True, slots=True)
class Program:
    """What to run: a script, a module (`-m`), or any executable (`--no-python`)."""

    kind: str
    """script, module, or exec"""
    target: str
    arguments: tuple[str, ...] = ()

    def argv(self) -> list[str]:
        """The command line that starts it in a new process."""
        match self.kind:
            case "script":
                return [sys.executable, "-u", self.target, *self.arguments]
            case "module":
                return [sys.executable, "-u", "-m", self.target, *self.arguments]
            case _:
                return [self.target, *self.arguments]


def read_ahead(program: Program) -> types.CodeType | None:
    """Compile the script before it is run. None: it is a module or a folder, or cannot be read."""
    global _read_ahead
    if program.kind != "script":
        return None
    try:
        source = _source(program.target)
        with warnings.catch_warnings(action="ignore"):  # shown when the script was first run
            _read_ahead = source, compile(source, program.target, "exec")
    except (OSError, SyntaxError, ValueError):
        return None
    return _read_ahead[1]


def run(program: Program) -> None:
    """Run it to its end. Returns or raises SystemExit; then the interpreter should exit.

    A child that the script forks and that does not exit by itself comes back here, too.
    """
    end = _End(os.getpid())
    # Registered before the script's own handlers, so that they are called after them.
    atexit.register(_unfreeze)
    atexit.register(end.report)
    try:
        if program.kind == "module":
            _run_module(program)
        else:
            _run_script(program)
    except SystemExit as error:
        if error.code in (None, 0):
            end.is_good = True
        else:
            end.failed(error.with_traceback(_without_ours(error)))
        raise
    except BaseException as error:  # noqa: BLE001 - nothing of the user's is below this frame
        error = error.with_traceback(_without_ours(error))
        end.failed(error)
        _exit_with(error, is_child=not end.is_ours)
    end.is_good = True


def _unfreeze() -> None:
    """Let the interpreter free what the zygote has frozen (`gc.freeze`), where a library looks.

    Libraries made with nanobind, such as Triton 3.9, report every object that is left as a leak.
    Without them the memory is left to the kernel, which is faster.
    """
    if any(kind.__name__ == NANOBIND for kind in type.__subclasses__(type)):
        gc.unfreeze()


@dataclass
class _End:
    """How the script ends. A child that it has forked reports nothing."""

    pid: int
    is_good: bool = False

    @property
    def is_ours(self) -> bool:
        return os.getpid() == self.pid

    def failed(self, error: BaseException) -> None:
        self._write(ScriptResult(error=script_result.describe(error)))

    def report(self) -> None:
        """Called when the script's threads and exit handlers have ended."""
        if self.is_good:
            self._write(ScriptResult(ended=True))

    def _write(self, result: ScriptResult) -> None:
        path = config.environ.get("TASKD_RESULT_FILE")
        if path and self.is_ours:
            script_result.write(path, result)


def _run_script(program: Program) -> None:
    path = program.target
    sys.argv = [path, *program.arguments]
    if os.path.isdir(path) or zipfile.is_zipfile(path):
        sys.path.insert(0, path)
        _fresh_main()
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    try:
        source = _source(path)
    except OSError as error:
        reason = f"[Errno {error.errno}] {error.strerror}"
        sys.stderr.write(f"{sys.executable}: can't open file {os.path.abspath(path)!r}: {reason}\n")
        sys.exit(2)
    main = _fresh_main()
    main.__file__ = path
    main.__dict__["__cached__"] = None
    if _read_ahead is not None and _read_ahead[0] == source:
        code = _read_ahead[1]
    else:
        code = compile(source, path, "exec")
    exec(code, main.__dict__)


def _source(path: str) -> bytes:
    with io.open_code(os.path.abspath(path)) as file:
        return file.read()


def _run_module(program: Program) -> None:
    sys.path.insert(0, os.getcwd())
    sys.argv = [program.target, *program.arguments]
    _fresh_main()
    runpy._run_module_as_main(program.target, alter_argv=True)  # type: ignore[attr-defined]


def _fresh_main() -> types.ModuleType:
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    return main


def _exit_with(error: BaseException, is_child: bool) -> None:
    """Report an uncaught exception as the interpreter does."""
    if not is_child:
        _write_error_file(error)
    sys.excepthook(type(error), error, error.__traceback__)
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    sys.exit(1)


def _without_ours(error: BaseException) -> types.TracebackType | None:
    """Its traceback without our own frames."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in _OURS:
        trace = trace.tb_next
    return trace


_OURS = {__file__, runpy.__file__, "<frozen runpy>"}


def _write_error_file(error: BaseException) -> None:
    """As torchelastic's `@record` does, for scripts that do not use it."""
    path = config.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.path.exists(path):
        return
    report = {
        "message": {
            "message": f"{type(error).__name__}: {error}",
            "extraInfo": {
                "py_callstack": "".join(traceback.format_exception(error)),
                "timestamp": str(int(clock.wall())),
            },
        }
    }
    try:
        with open(path, "w") as file:
            json.dump(report, file)
    except OSError as problem:
        sys.stderr.write(f"cannot write the error file {path}: {problem.strerror}\n")
