from __future__ import annotations

import subprocess
import sys


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )


def test_without_torch_the_reason_is_told() -> None:
    done = run(
        "import importlib.util as util\n"
        "find = util.find_spec\n"
        "util.find_spec = lambda name, *more: None if name == 'torch' else find(name, *more)\n"
        "import mindx_elastic.api\n"
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ImportError: mindx_elastic.api changes how torch starts its workers, "
        "and torch is not installed"
    )


def test_the_package_itself_needs_no_torch() -> None:
    done = run("import sys, mindx_elastic; assert 'torch' not in sys.modules")
    assert (done.returncode, done.stderr) == (0, "")


def test_importing_it_patches_torch() -> None:
    done = run(
        "import taskd.python.adaptor.patch.torch_patch as seam\n"
        "called = []\n"
        "seam.patch_torch_method = lambda: called.append(1)\n"
        "import mindx_elastic.api\n"
        "assert called == [1]\n"
        "mindx_elastic.api.patch_torch_methods()\n"
        "assert called == [1, 1]\n"
    )
    assert done.returncode == 0, done.stderr
