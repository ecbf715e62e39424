from __future__ import annotations

import shutil
import subprocess

import pytest

from taskd import cli, completion
from taskd.completion import SCRIPTS, possible


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("sta", ["status"]),
        ("re", ["replay"]),
        ("status --w", ["--watch"]),
        ("status d", ["demo"]),
        ("profile demo o", ["off", "on"]),
        ("fault demo --kind m", ["memory"]),
        ("nic demo --to ", ["backup", "primary"]),
        ("run --dash", ["--dashboard"]),
        ("nothing --x", []),
        ("status --server ", []),
    ],
)
def test_words_that_can_follow(line: str, expected: list[str]) -> None:
    assert possible(line.split(" "), completion._parser_of, lambda: ["demo", "x\x1b"]) == expected


def test_all_commands_are_offered_first() -> None:
    assert {"run", "dashboard", "completion"} <= set(possible([""], completion._parser_of, list))


def test_two_dashes_are_the_beginning_of_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "words", "--", "status", "--"]) == 0
    assert {"--watch", "--json"} <= set(capsys.readouterr().out.split())


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_is_valid_in_its_shell(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n"], input=SCRIPTS[shell], text=True, check=True, timeout=60)
