"""Every error that Duetime raises on purpose.

    DuetimeError
    ├── InvalidInput         the request breaks a rule; names the field
    │   └── PayloadTooLarge  the request is larger than the settings allow
    ├── TimerNotFound        there is no such timer
    ├── TimerConflict        the id is taken by a timer with other parameters
    │   └── TimerNotFinal    the timer can't be replayed: it has not been finished
    ├── TimerNotPending      the timer is executing or final, so the change lost the race
    ├── UnknownNamespace     the namespace was never made
    ├── NamespaceConflict    the name is taken by a namespace with other settings
    ├── TooManyNamespaces    there are as many as the settings allow
    ├── SecretNotFound       the namespace has no such secret
    ├── Quarantined          this program can't read the timer or the namespace that is stored
    ├── SettingsError        a setting is missing or wrong; the start stops with this line
    └── StoreError
        ├── StoreUnavailable     nothing was written; try again later
        ├── StoreIndeterminate   a write was sent and its fate is unknown: never retry it blindly
        └── StoreFailed          the store must not be trusted any more; the process stops

Doors translate ``Quarantined`` and ``StoreError`` into their own 5xx, and all others but ``SettingsError`` into 4xx.
"""

from __future__ import annotations


class DuetimeError(Exception):
    """The root: catch it to catch whatever Duetime raises on purpose."""


class InvalidInput(DuetimeError):
    """The request breaks a rule of the contract."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field} {reason}" if field else reason)
        self.field = field
        self.reason = reason


class PayloadTooLarge(InvalidInput):
    """The request is larger than the limit that the settings give."""


class TimerNotFound(DuetimeError):
    def __init__(self) -> None:
        super().__init__("timer not found")


class TimerConflict(DuetimeError):
    """A timer with this identity exists and was made with other parameters."""


class TimerNotFinal(TimerConflict):
    """Only a finished timer can be fired again."""

    def __init__(self, status: str) -> None:
        super().__init__(f"cannot replay timer with status '{status}'")


class TimerNotPending(DuetimeError):
    """The timer left ``pending`` before the change was written."""

    def __init__(self, verb: str, status: str) -> None:
        super().__init__(f"cannot {verb} timer with status '{status}'")
        self.status = status


class UnknownNamespace(DuetimeError):
    def __init__(self, name: str) -> None:
        super().__init__(f"namespace '{name}' does not exist")
        self.name = name


class NamespaceConflict(DuetimeError):
    """A namespace of this name exists and has other settings."""


class TooManyNamespaces(DuetimeError):
    """There are as many namespaces as the settings allow."""

    def __init__(self, most: int) -> None:
        super().__init__(f"the maximum of {most} namespaces is reached: reuse one, or raise DUETIME_MAX_NAMESPACES")


class SecretNotFound(DuetimeError):
    def __init__(self) -> None:
        super().__init__("the namespace has no secret with this id")


class Quarantined(DuetimeError):
    """A row that this program can't read. It is kept as it is, and nothing is sent for it."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} is quarantined: this version of Duetime can't read what is stored. It is kept, and nothing is "
            "sent; the log of the service has the reason"
        )


class SettingsError(DuetimeError):
    """A setting is missing or wrong."""


class StoreError(DuetimeError):
    """The store could not do what was asked. Its text, which may name hosts, is for the log; clients get ``public``."""

    public = "the timer store can't be used now"


class StoreUnavailable(StoreError):
    """Nothing was written; the same call may work later."""

    public = "the timer store can't be reached now: nothing was written, try again"


class StoreIndeterminate(StoreError):
    """A write was sent and nobody knows whether it was committed."""

    public = "the timer store did not answer: it may or may not have been written; repeat it with the same id to know"


class StoreFailed(StoreError):
    """The store reported damage (a failed write or sync): nothing it says may be trusted."""
