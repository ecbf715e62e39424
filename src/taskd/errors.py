"""Our exceptions, arranged by who has to act.

    TaskdError
    ├── SettingsError      the operator: a setting is missing or invalid
    ├── Transient          the program itself: wait, then try again
    │   └── PeerUnreachable
    └── Permanent          the caller: trying again cannot help
        ├── PeerRefused    the peer understood the request and refused it
        └── UnknownTorch   the installed torch lacks something that we rely on

A fault in training is not an exception. It is a value that is sent as an event.
"""


class TaskdError(Exception):
    """The base class of all exceptions that TaskD raises on purpose."""


class SettingsError(TaskdError):
    """All invalid settings at once, one per line."""

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
