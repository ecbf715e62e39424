"""Adds the empty `libtaskd.so` to wheels and editable installs (see tools/stub_library.py).

Everything else about the package is in pyproject.toml.

A wheel holds the library of one machine. `make dist` names the platform with --plat-name and gets
the tag `manylinux2014_x86_64` or `manylinux2014_aarch64`, which PyPI accepts; the library needs no
glibc, so the tag promises nothing that is not true. A wheel that pip builds from the sdist gets the
tag of the machine that builds it, so that it can be installed on musl as well.
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


def machine_of(platform_tag: str) -> str:
    """Return the machine of a tag like `manylinux2014_x86_64`, or "" if it has no library."""
    return next((m for m in STUB["MACHINES"] if platform_tag.endswith(f"_{m}")), "")


def own_platform() -> str:
    return f"linux_{platform.machine()}" if sys.platform == "linux" else ""


class BuildWithLibrary(build_py):
    def run(self) -> None:
        super().run()
        wheel = self.distribution.get_command_obj("bdist_wheel")
        named = str(wheel.plat_name or "") if wheel.plat_name_supplied else ""
        machine = machine_of(named.replace("-", "_") or own_platform())
        for folder in self._folders() if machine else ():
            STUB["write"](folder / LIBRARY, machine)

    def _folders(self) -> list[Path]:
        """Where the library goes.

        An editable install needs it twice: next to the sources, where `taskd.python.cython_api`
        looks, and in site-packages, where the documented LD_PRELOAD line looks (it takes
        `Location` from `pip show taskd`). There it stands alone in a folder without __init__.py,
        which does not hide the sources from `import taskd`.
        """
        if not self.editable_mode:
            return [Path(self.build_lib)]
        return [HERE / "src", Path(self.distribution.get_command_obj("install").install_lib)]


class WheelForOneMachine(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        platform_tag = super().get_tag()[2] if self.plat_name_supplied else own_platform()
        return ("py3", "none", platform_tag) if machine_of(platform_tag) else super().get_tag()


setup(cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": WheelForOneMachine})
