"""Our errors, arranged by who has to act.

    TaskdError
    ├── SettingsError      the operator: a setting is missing or wrong
    ├── Transient          nobody: wait, then try again
    │   └── PeerUnreachable
    └── Permanent          the caller: trying again cannot help
        └── PeerRefused    the peer understood and said no

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
