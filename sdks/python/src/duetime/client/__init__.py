"""The Python client of Duetime, durable timers that call you back. It creates, lists and changes timers, and verifies
that a callback is genuine.

    from datetime import timedelta
    from duetime.client import Client

    with Client() as client:
        timer = client.create(delay=timedelta(minutes=10), callback_url="https://example.com/hook", payload={"a": 1})
        print(timer.namespace, timer.id, timer.execute_at)

``Client`` is synchronous and ``AsyncClient`` asynchronous; they have the same methods. They raise these exceptions, and
``TypeError`` for an argument of the wrong type:

    DuetimeClientError     code, message, details, status
    ├── InvalidRequest       the request breaks a rule; details["field"] is the field of the API
    │   └── Unsupported        the service's database does not support it
    ├── Unauthorized         the API key is missing or wrong
    ├── NotFound             the timer, namespace or secret does not exist
    ├── Conflict             the id or name is taken, or the timer's status does not allow the operation
    ├── NotPending           the timer is executing or finished, so it can no longer be changed
    ├── Unavailable          the service can't serve the request now: 429, or 5xx except 501
    ├── ConnectionFailed     no complete response arrived; sent: whether the service may have carried it out anyway
    ├── UnexpectedResponse   the response is not one that Duetime sends: does another server listen at the URL?
    └── InvalidSignature     verify_webhook: the callback is not from the service, or is too old

The client retries failed connections and the statuses 429, 502, 503 and 504 until ``timeout_seconds`` are over. That is
safe because the calls are idempotent: a create carries an id (the client generates one if none is given), an update
describes the wanted result, and a delete that finds nothing has been carried out already. ``replay``, ``replay_all``,
``add_secret`` and an ``upsert`` with a ``delay`` are not idempotent. The client retries them only when the service
can't have seen the request.
"""

from duetime.client.async_client import AsyncClient
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
    UnexpectedResponse,
    Unsupported,
)
from duetime.client.sync_client import Client
from duetime.client.values import (
    Abilities,
    ActivityPoint,
    Attempt,
    Changes,
    Cluster,
    Count,
    DestinationFailures,
    Duration,
    Failures,
    Forecast,
    ForecastStep,
    Health,
    Instance,
    Namespace,
    NewSecret,
    NewTimer,
    OutcomeKind,
    Overview,
    RetryOptions,
    RetryPolicy,
    SecretInfo,
    Status,
    Timer,
    TimerPage,
)
from duetime.client.version import __version__
from duetime.client.webhook import verify_webhook

__all__ = [
    "Abilities",
    "ActivityPoint",
    "AsyncClient",
    "Attempt",
    "Changes",
    "Client",
    "Cluster",
    "Conflict",
    "ConnectionFailed",
    "Count",
    "DestinationFailures",
    "DuetimeClientError",
    "Duration",
    "Failures",
    "Forecast",
    "ForecastStep",
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
    "Overview",
    "RetryOptions",
    "RetryPolicy",
    "SecretInfo",
    "Status",
    "Timer",
    "TimerPage",
    "Unauthorized",
    "Unavailable",
    "UnexpectedResponse",
    "Unsupported",
    "__version__",
    "verify_webhook",
]
