"""Our exceptions, arranged by who has to act.

    TaskdError
    ├── SettingsError      the operator: a setting is missing or invalid
    │   └── WrongCommand   the command itself is wrong, wherever and whenever it is started
    ├── Transient          the program itself: wait, then try again
    │   └── PeerUnreachable
    └── Permanent          the caller: trying again cannot help
        ├── PeerRefused    the peer understood the request and refused it
        └── UnknownTorch   the installed torch lacks something that we rely on

A fault in training is not an exception. It is a value that is sent as an event.
"""

DO_NOT_REPLACE = 78
"""The exit code of `taskd run` if the same command would only fail in the same way again.

Programs that start failed pods or jobs again should not do so with this code.
"""


class TaskdError(Exception):
    """The base class of all exceptions that TaskD raises on purpose."""

    exit_code = 1
    """Of the command that it ends."""


class SettingsError(TaskdError):
    """All invalid settings at once, one per line."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class WrongCommand(SettingsError):
    exit_code = DO_NOT_REPLACE


class Transient(TaskdError): ...


class PeerUnreachable(Transient): ...


class JobElsewhere(Transient):
    """This launcher has started a job that already runs. It must start again, and join it."""

    def __init__(self, addresses: tuple[str, ...]) -> None:
        super().__init__(f"the job runs with the etcd at {', '.join(addresses)}")
        self.addresses = addresses


class EtcdLostAtStart(Transient):
    """The job's etcd is gone, and no rank has begun yet. This launcher must start again."""

    def __init__(self, problem: str, *, do_without: bool) -> None:
        super().__init__(problem)
        self.do_without = do_without
        """This node has started it, and it has never answered: the next one would not either."""


class Permanent(TaskdError): ...


class PeerRefused(Permanent): ...


class UnknownTorch(Permanent):
    """The installed torch lacks a name that TaskD relies on.

    The message gives the torch version, each missing name, what TaskD needs it for, and the
    supported versions. Install a supported torch, or run the script without `taskd.torch`.
    """
