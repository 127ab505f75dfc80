"""Every error that Duetime raises on purpose.

    DuetimeError
    ├── InvalidInput         the request breaks a rule; names the field
    │   ├── InvalidCursor    the cursor does not belong to this list
    │   ├── UnknownName      no field or query parameter has this name
    │   ├── Unsupported      the configured database can't do this
    │   └── PayloadTooLarge  the request is larger than the settings allow
    ├── TimerNotFound        the timer does not exist
    ├── TimerConflict        a timer with this id exists with different parameters
    ├── TimerNotFinal        the timer can't be replayed because it is not finished
    ├── TimerNotPending      the timer is executing or final, so it can't be changed
    ├── UnknownNamespace     the namespace does not exist
    ├── NamespaceConflict    a namespace with this name exists with different settings
    ├── TooManyNamespaces    the maximum number of namespaces is reached
    ├── SecretNotFound       the secret does not exist
    ├── Quarantined          this version can't read the stored timer or namespace
    ├── SettingsError        a setting is missing or wrong; the process does not start
    └── StoreError
        ├── StoreUnavailable     the store wrote nothing; try again later
        │   └── Contended        other requests keep changing the same timer or namespace
        ├── StoreIndeterminate   a write was sent and its result is unknown: never retry it blindly
        └── StoreFailed          the store can't be trusted any more; the process stops

The APIs respond to ``Quarantined`` and ``StoreError`` with 5xx, and to all others except ``SettingsError`` with 4xx.
"""

from __future__ import annotations

UUID_CHARS = 36


class DuetimeError(Exception):
    """The base class of all errors that Duetime raises on purpose."""


class InvalidInput(DuetimeError):
    """The request breaks a rule of the API."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field} {reason}" if field else reason)
        self.field = field
        self.reason = reason


class InvalidCursor(InvalidInput):
    """The store did not issue this cursor for this list."""

    def __init__(self) -> None:
        super().__init__("cursor", "must be the nextCursor of a page with the same filters")


class UnknownName(InvalidInput):
    """The request has a field or a query parameter that the operation does not know, named as the client wrote it."""


class Unsupported(InvalidInput):
    """The configured database can't do what was requested; another one can."""


class PayloadTooLarge(InvalidInput):
    """The request is larger than the settings allow."""


class TimerNotFound(DuetimeError):
    def __init__(self, namespace: str, id: str) -> None:
        super().__init__(f"timer '{id}' not found in namespace '{namespace}'")


class TimerConflict(DuetimeError):
    def __init__(self, namespace: str, id: str) -> None:
        super().__init__(f"a timer with id '{id}' already exists in namespace '{namespace}' with different parameters")


class TimerNotFinal(DuetimeError):
    """Only a finished timer can be replayed."""

    def __init__(self, status: str) -> None:
        super().__init__(f"can't replay a timer with status '{status}': only finished timers can be replayed")


class TimerNotPending(DuetimeError):
    """The timer is not pending any more, so it can't be changed."""

    def __init__(self, verb: str, status: str) -> None:
        super().__init__(f"can't {verb} a timer with status '{status}'")
        self.verb = verb
        self.status = status


class UnknownNamespace(DuetimeError):
    def __init__(self, name: str) -> None:
        super().__init__(f"namespace '{name}' does not exist; POST /api/v1/namespaces creates it")
        self.name = name


class NamespaceConflict(DuetimeError):
    """A namespace with this name exists with different settings."""


class TooManyNamespaces(DuetimeError):
    """The maximum number of namespaces is reached."""

    def __init__(self, most: int) -> None:
        super().__init__(f"the maximum of {most} namespaces is reached: reuse one, or raise DUETIME_MAX_NAMESPACES")


class SecretNotFound(DuetimeError):
    def __init__(self, namespace: str, id: str) -> None:
        # A key that was given for the id is longer, and must not appear in messages.
        shown = id if len(id) <= UUID_CHARS else "…"
        super().__init__(f"secret '{shown}' not found in namespace '{namespace}'")


class Quarantined(DuetimeError):
    """This version can't read the stored row. The row is kept unchanged, and nothing is sent for it."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} is quarantined: this version of Duetime can't read the stored data. The data is kept, and nothing "
            "is sent; see the server's log for the reason"
        )


class SettingsError(DuetimeError):
    """A setting is missing or wrong."""


class StoreError(DuetimeError):
    """The store failed. The error's text may name hosts and is only for the log; clients get ``public``."""

    public = "the timer store is unavailable"


class StoreUnavailable(StoreError):
    """The store wrote nothing; the same call may work later. A bulk change may have made earlier calls."""

    public = "the timer store is unavailable: try again"


class Contended(StoreUnavailable):
    """Whenever this request tried to change a timer or namespace, another one had just changed it."""

    public = "other requests keep changing the same timer or namespace: try again"

    def __init__(self) -> None:
        super().__init__(self.public)


class StoreIndeterminate(StoreError):
    """A write was sent, and it is unknown whether it was committed."""

    public = (
        "the timer store did not respond: the request may or may not have taken effect; repeat it with the same id to "
        "find out"
    )


class StoreFailed(StoreError):
    """The store reported damage (a failed write or sync), so its data can't be trusted."""
