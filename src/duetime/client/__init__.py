"""The Python client of Duetime: make timers, look at them, change them; and know a real callback from a forged one.

    from datetime import timedelta
    from duetime.client import Client

    with Client() as client:
        timer = client.create(delay=timedelta(minutes=10), callback_url="https://example.com/hook", payload={"a": 1})
        print(timer.namespace, timer.id, timer.execute_at)

``Client`` blocks and ``AsyncClient`` is awaited; they have the same methods. Whatever goes wrong is one of these:

    DuetimeClientError     code, message, details, status
    ├── InvalidRequest       what was asked breaks a rule; details["field"] names the field
    ├── Unauthorized         the key is missing or is not the server's
    ├── NotFound             there is no such timer, namespace or secret
    ├── Conflict             the name is taken, or the timer is not in a state that allows this
    ├── NotPending           the timer is executing or finished, so that it can no longer be changed
    ├── Unavailable          the server can't do it now, and could not for as long as the client tried
    ├── ConnectionFailed     there was no whole answer; sent: whether the server may have done it all the same
    ├── UnexpectedAnswer     what answered does not speak like Duetime: is the URL right?
    └── InvalidSignature     verify_webhook: the callback is not from the server, or is not fresh

Failed connections, 429 and 503 are tried again until ``timeout_seconds`` are over. That is safe because the calls are
made to be repeated: a create carries an id (made by the client when none is given), an update says what should be so,
and a delete that finds nothing has been done. The few that mean something else the second time (``replay``,
``replay_all``, ``add_secret``, an ``upsert`` with a ``delay``) are tried again only when the server can't have seen
them.
"""

from duetime.client.awaiting import AsyncClient
from duetime.client.blocking import Client
from duetime.client.errors import (
    Conflict,
    ConnectionFailed,
    DuetimeClientError,
    InvalidRequest,
    InvalidSignature,
    NotFound,
    NotPending,
    Unauthorized,
    Unavailable,
    UnexpectedAnswer,
)
from duetime.client.values import (
    Attempt,
    Changes,
    Cluster,
    Duration,
    Health,
    Instance,
    Namespace,
    NewSecret,
    NewTimer,
    RetryOptions,
    RetryPolicy,
    SecretInfo,
    Timer,
    TimerPage,
)
from duetime.client.webhook import verify_webhook
from duetime.model import OutcomeKind, Status

__all__ = [
    "AsyncClient",
    "Attempt",
    "Changes",
    "Client",
    "Cluster",
    "Conflict",
    "ConnectionFailed",
    "DuetimeClientError",
    "Duration",
    "Health",
    "Instance",
    "InvalidRequest",
    "InvalidSignature",
    "Namespace",
    "NewSecret",
    "NewTimer",
    "NotFound",
    "NotPending",
    "OutcomeKind",
    "RetryOptions",
    "RetryPolicy",
    "SecretInfo",
    "Status",
    "Timer",
    "TimerPage",
    "Unauthorized",
    "Unavailable",
    "UnexpectedAnswer",
    "verify_webhook",
]
