"""Adds one file to the build: the empty `libtaskd.so` (see tools/stub_library.py).

Everything else about the package is in pyproject.toml.
"""

from __future__ import annotations

import platform
import runpy
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
LIBRARY = Path("taskd/python/cython_api/libs/libtaskd.so")
STUB = runpy.run_path(str(HERE / "tools" / "stub_library.py"))
HAS_LIBRARY = sys.platform == "linux" and platform.machine() in STUB["MACHINES"]


class BuildWithLibrary(build_py):
    def run(self) -> None:
        super().run()
        if HAS_LIBRARY:
            place = HERE / "src" if self.editable_mode else Path(self.build_lib)
            (place / LIBRARY).parent.mkdir(parents=True, exist_ok=True)
            (place / LIBRARY).write_bytes(STUB["library"](platform.machine()))


class WheelForThisMachine(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        if not HAS_LIBRARY:
            return super().get_tag()
        return "py3", "none", f"linux_{platform.machine()}"


setup(cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": WheelForThisMachine})
