"""`taskd completion bash|zsh|fish`: prints a script that completes commands, options and job names.

    source <(taskd completion bash)          # or in ~/.bashrc
    source <(taskd completion zsh)
    taskd completion fish | source

The script asks `taskd completion words -- WORD…` for the possible words, so it never becomes stale.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from taskd.clusterd.locate import announced
from taskd.errors import SettingsError

BASH = """_taskd() {
    local IFS=$'\\n'
    COMPREPLY=($(taskd completion words -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
    [[ ${#COMPREPLY[@]} -gt 0 ]] || COMPREPLY=($(compgen -f -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o filenames -F _taskd taskd
"""
ZSH = """_taskd() {
    local -a found
    found=("${(@f)$(taskd completion words -- "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    [[ -n "$found" ]] && compadd -- "${found[@]}" || _files
}
compdef _taskd taskd
"""
FISH = """function __taskd_words
    set -l all (commandline -opc) (commandline -ct)
    taskd completion words -- $all[2..-1] 2>/dev/null
end
complete -c taskd -a '(__taskd_words)'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "shell", choices=[*SCRIPTS, "words"], help="the shell that reads the script"
    )
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    if arguments.shell in SCRIPTS:
        sys.stdout.write(SCRIPTS[arguments.shell])
        return 0
    words = arguments.words[1:] if arguments.words[:1] == ["--"] else arguments.words
    found = possible(words, _parser_of, _jobs)
    sys.stdout.writelines(f"{word}\n" for word in found)
    return 0


def possible(words: Sequence[str], parser_of: Any, jobs: Any) -> list[str]:
    """The words that can stand at the end of this command line, where the last one is begun."""
    begun = words[-1] if words else ""
    if len(words) < 2:
        return _with(begun, [*parser_of(""), "--help", "--version"])
    actions = parser_of(words[0])
    if begun.startswith("-"):
        return _with(begun, [name for action in actions for name in action.option_strings])
    before = next((a for a in actions if words[-2] in a.option_strings), None)
    if before is not None and before.choices:
        return _with(begun, before.choices)
    if before is not None and before.nargs != 0:
        return []
    positional = [action for action in actions if not action.option_strings]
    given = sum(not word.startswith("-") for word in words[1:-1])
    if given >= len(positional):
        return []
    here = positional[given]
    return _with(begun, jobs() if here.dest == "job" else here.choices or [])


def _with(begun: str, words: Any) -> list[str]:
    return sorted(word for word in map(str, words) if word.startswith(begun) and word.isprintable())


def _parser_of(command: str) -> list[Any]:
    """The names of all commands, or the options and arguments of one."""
    from importlib import import_module

    from taskd.cli import COMMANDS

    if not command:
        return list(COMMANDS)
    if command not in COMMANDS:
        return []
    parser = argparse.ArgumentParser()
    module: Any = import_module(COMMANDS[command].module)
    module.add_arguments(parser)
    return parser._actions


def _jobs() -> list[str]:
    try:
        return [place.job for place in announced()]
    except SettingsError:
        return []
