"""Our errors, arranged by who has to act.

    TaskdError
    ├── SettingsError      the operator: a setting is missing or wrong
    ├── Transient          nobody: wait, then try again
    │   └── PeerUnreachable
    └── Permanent          the caller: trying again cannot help
        ├── PeerRefused    the peer understood and said no
        └── UnknownTorch   the installed torch lacks something that we rely on

A fault in training is not an error. It is a value, and it travels as an event.
"""


class TaskdError(Exception):
    """Catch this to catch everything we raise on purpose."""


class SettingsError(TaskdError):
    """Every wrong setting at once, one a line."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class Transient(TaskdError): ...


class PeerUnreachable(Transient): ...


class Permanent(TaskdError): ...


class PeerRefused(Permanent): ...


class UnknownTorch(Permanent):
    """The installed torch lacks a name that TaskD relies on.

    The message gives the torch version, each missing name, what TaskD needs it for, and the
    supported versions. Install a supported torch, or run the script without `taskd.torch`.
    """
