"""The round trip with the Python client of openapi-generator."""

import os
from datetime import UTC, datetime
from uuid import UUID

from openapi_client import (
    ApiClient,
    BatchIn,
    Changes,
    Configuration,
    CreatePlatformTimer,
    CreatePlatformTimerCallback,
    CreateTimer,
    HttpCallback,
    OverviewApi,
    PlatformApi,
    RetryPolicy,
    Status,
    TimersApi,
)
from openapi_client.exceptions import NotFoundException

LATER = datetime(2099, 1, 31, 9, tzinfo=UTC)

configuration = Configuration(host=os.environ["DUETIME_URL"])
configuration.api_key["apiKey"] = os.environ["API_KEY"]

with ApiClient(configuration) as client:
    timers = TimersApi(client)

    created = timers.create(
        CreateTimer(
            id="trip-1",
            delay="1h",
            callback_url="http://127.0.0.1:9/hook",
            callback_headers={"X-Tenant": "acme"},
            payload={"invoice": 42},
            correlation_id="trip",
            retry_policy=RetryPolicy(max_retries=5, initial_interval="10s"),
        )
    )
    assert created.status == Status.PENDING and created.callback_subject is None, created
    assert created.payload == {"invoice": 42} and created.callback_headers == {"X-Tenant": "acme"}, created
    assert created.retry_policy.max_retries == 5 and created.retry_policy.give_up_on == [], created

    assert timers.get("default", "trip-1") == created

    page = timers.list(correlation_id="trip", status=Status.PENDING)
    assert page.timers == [created] and page.next_cursor is None, page

    updated = timers.update("default", "trip-1", Changes(execute_at=LATER))
    assert updated.execute_at == LATER and updated.payload == {"invoice": 42}, updated
    assert updated.callback_headers == {"X-Tenant": "acme"} and updated.retry_policy == created.retry_policy, updated

    canceled = timers.cancel("default", "trip-1")
    assert canceled.status == Status.CANCELED and canceled.executed_at is None, canceled

    batch = timers.batch(
        BatchIn(
            timers=[
                CreateTimer(id="trip-2", delay="1h", callback_url="http://127.0.0.1:9/hook"),
                CreateTimer(id="trip-3", delay="1h", execute_at=LATER, callback_url="http://127.0.0.1:9/hook"),
            ]
        )
    )
    made, refused = batch.results
    assert made.status == 200 and made.timer.id == "trip-2" and made.error is None, made
    assert refused.status == 400 and refused.error.details == {"field": "delay"}, refused

    platform = PlatformApi(client)
    callback = CreatePlatformTimerCallback(HttpCallback(type="http", url="http://127.0.0.1:9/platform", payload=[1]))
    summary = platform.platform_create(CreatePlatformTimer(execute_at=LATER, callback=callback)).data
    shown = platform.platform_get(summary.id).data
    assert shown.execute_at == LATER and shown.callback_url == "http://127.0.0.1:9/platform", shown
    assert shown.callback_payload == [1] and shown.last_error is None, shown

    assert OverviewApi(client).overview().statuses["pending"] == 2

    try:
        platform.platform_get(UUID(int=0))
    except NotFoundException as error:
        assert error.data.code == 3 and error.data.message and error.data.data is None, error.data
    else:
        raise AssertionError("no error")

    try:
        timers.get("default", "missing")
    except NotFoundException as error:
        assert error.data.error == "TIMER_NOT_FOUND" and error.data.message, error.data
    else:
        raise AssertionError("no error")
