"""Every operation of both clients against a real service, and the exceptions for requests that it rejects."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import msgspec
import pytest

from duetime.client import (
    Client,
    Conflict,
    DuetimeClientError,
    InvalidRequest,
    NewTimer,
    NotFound,
    NotPending,
    RetryPolicy,
    Status,
    Timer,
    Unauthorized,
    calls,
    exchange,
)
from duetime.client.failures import Failure, error_of
from duetime.client.values import decode, to_json
from duetime.settings import keyfile
from tests.servers import KEY, Duetime, Receiver, Reply, until

URL = "http://127.0.0.1:9/never"


def fresh() -> str:
    return str(uuid.uuid4())


def finished(client: Client, id: str) -> Timer:
    def final() -> Timer | None:
        timer = client.get(id)
        return timer if timer.status.final else None

    timer: Timer = until(f"timer {id} is final", final)
    return timer


def test_timer_from_create_to_delete(client: Client, receiver: Receiver) -> None:
    path = f"/{fresh()}"
    at = datetime.now(UTC) + timedelta(hours=1)
    made = client.create(
        execute_at=at.astimezone(timezone(timedelta(hours=5, minutes=30))),
        callback_url=receiver.url(path),
        callback_method="PUT",
        callback_headers={"X-One": "1"},
        payload={"text": "ü", "big": 10**30, "none": None},
        metadata=[1, 2.5],
        correlation_id="c",
        retry_policy={"max_retries": 7, "initial_interval": timedelta(seconds=90), "max_interval": "2h"},
        callback_timeout=timedelta(seconds=31, milliseconds=500),
        response_protocol="status",
    )
    assert uuid.UUID(made.id) and made.namespace == "default" and made.status is Status.PENDING
    assert timedelta(0) <= made.execute_at - at < timedelta(milliseconds=1)  # rounded up
    assert made.callback_timeout == timedelta(seconds=31.5) and str(made.callback_timeout) == "31s500ms"
    assert (made.retry_policy.max_retries, made.retry_policy.initial_interval) == (7, timedelta(seconds=90))
    assert made.retry_policy.max_retry_attempts_duration == timedelta(days=1)
    assert made.payload == {"text": "ü", "big": 10**30, "none": None} and made.metadata == [1, 2.5]
    assert client.get(made.id) == made

    # A policy from a response is accepted in a request.
    changed = client.update(made.id, payload=None, retry_policy=made.retry_policy, delay="0s")
    assert changed.payload is None and changed.retry_policy == made.retry_policy
    [request] = receiver.wait(path)
    assert request.method == "PUT" and request.headers["x-one"] == "1"
    done = finished(client, made.id)
    assert done.status is Status.COMPLETED and done.attempts == 1 and done.executed_at is not None
    [attempt] = client.attempts(made.id)
    assert (attempt.attempt, attempt.outcome, attempt.status) == (1, "answered", 200)

    with pytest.raises(NotPending) as late:
        client.update(made.id, delay="1s")
    assert (late.value.code, late.value.status) == ("TIMER_NOT_PENDING", 409)
    assert client.replay(made.id).status is Status.PENDING
    receiver.wait(path, 2)
    finished(client, made.id)
    assert client.delete(made.id) is None
    with pytest.raises(NotFound) as gone:
        client.get(made.id)
    assert gone.value.code == "TIMER_NOT_FOUND"
    assert str(gone.value) == f"timer '{made.id}' not found in namespace 'default'"


def test_create_is_idempotent_and_upsert_replaces(client: Client) -> None:
    id = fresh()
    first = client.create(id=id, delay=timedelta(hours=1), callback_url=URL, payload=1)
    assert client.create(id=id, delay=timedelta(hours=1), callback_url=URL, payload=1) == first
    with pytest.raises(Conflict) as conflict:
        client.create(id=id, delay=timedelta(hours=1), callback_url=URL, payload=2)
    assert conflict.value.code == "TIMER_CONFLICT"
    assert client.upsert(id=id, delay="2h", callback_url=URL, payload=2).payload == 2
    with pytest.raises(Conflict):
        client.replay(id)


@pytest.mark.parametrize("id", ["a/b", "ü ?#%", ".", "..", "a+b&c=d", "x" * 255])
def test_ids_can_have_special_characters(client: Client, id: str) -> None:
    assert client.upsert(id=id, delay="1h", callback_url=URL).id == id
    assert client.get(id).id == id
    client.delete(id)


def test_lists_and_pages_contain_the_filtered_timers_in_order(client: Client) -> None:
    group = fresh()
    client.create_namespace(group)
    now = datetime.now(UTC)
    new: list[NewTimer] = [
        {
            "namespace": group,
            "execute_at": now + timedelta(hours=n + 1),
            "callback_url": URL,
            "correlation_id": f"{group} & ü",
        }
        for n in range(7)
    ]
    made = client.batch(new)
    ids = [timer.id for timer in made if isinstance(timer, Timer)]
    assert len(set(ids)) == 7
    assert [timer.id for timer in client.list(namespace=group, status="pending", page_size=3)] == ids
    assert [timer.id for timer in client.list(correlation_id=f"{group} & ü", page_size=2)] == ids[::-1]
    some = client.list(
        namespace=group, execute_after=now + timedelta(hours=2.5), execute_before=now + timedelta(hours=4.5)
    )
    assert [timer.id for timer in some] == ids[2:4]
    page = client.page(namespace=group, status=Status.PENDING, limit=4)
    assert [timer.id for timer in page.timers] == ids[:4] and page.next_cursor
    rest = client.page(namespace=group, status=Status.PENDING, limit=4, cursor=page.next_cursor)
    assert [timer.id for timer in rest.timers] == ids[4:] and rest.next_cursor is None
    assert list(client.list(correlation_id=fresh())) == []
    with pytest.raises(InvalidRequest):
        client.page(cursor="nonsense")


def test_lists_continue_after_short_pages(client: Client) -> None:
    """The server ends a page after some megabytes, even below the limit."""
    group = fresh()
    client.create_namespace(group)
    new: list[NewTimer] = [
        {"id": f"t{n}", "namespace": group, "delay": f"{n + 1}h", "callback_url": URL, "payload": "x" * 240_000}
        for n in range(40)
    ]
    wanted = [one["id"] for one in new]
    assert [timer.id for timer in client.batch(new) if isinstance(timer, Timer)] == wanted
    again = client.batch(new)  # all of them exist and are returned with their payloads
    assert [(timer.id, len(timer.payload)) for timer in again if isinstance(timer, Timer)] == [
        (id, 240_000) for id in wanted
    ]
    page = client.page(namespace=group, status="pending", limit=40)
    assert 0 < len(page.timers) < 40 and page.next_cursor
    assert [timer.id for timer in client.list(namespace=group, status="pending", page_size=40)] == wanted


def test_batch_returns_a_result_for_each_timer(client: Client) -> None:
    id, other = fresh(), fresh()
    client.create(id=id, delay="1h", callback_url=URL)
    batch: list[NewTimer] = [
        {"delay": "1h", "callback_url": "nowhere"},
        {"delay": timedelta(hours=1), "callback_url": URL, "id": other},
        {"delay": "1h", "callback_url": URL, "id": id, "payload": "other"},
    ]
    one, two, three = client.batch(batch)
    assert isinstance(one, InvalidRequest) and one.details == {"field": "callbackUrl"} and one.status == 400
    assert isinstance(two, Timer) and two.id == other
    assert isinstance(three, Conflict)
    one_id, two_id, three_id = client.batch_ids(batch)
    assert isinstance(one_id, InvalidRequest) and isinstance(three_id, Conflict)
    assert two_id == other
    [made] = client.batch_ids([{"delay": "1h", "callback_url": URL}])
    assert isinstance(made, str) and client.get(made).id == made
    without_header = msgspec.structs.replace(calls.batch_ids(batch), headers={})  # as if a proxy had removed it
    assert client.run(without_header)[1] == other


def test_cancel_can_be_repeated(client: Client) -> None:
    id = fresh()
    client.create(id=id, delay="1h", callback_url=URL)
    assert client.cancel(id).status == client.cancel(id).status == client.get(id).status == "canceled"


def test_cancel_all_cancels_up_to_the_limit_by_filter(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "BULK_MAX", 2)
    group = fresh()
    new: list[NewTimer] = [{"delay": f"{n}h", "callback_url": URL, "correlation_id": group} for n in range(1, 8)]
    client.batch(new)
    other = client.create(delay="1h", callback_url=URL)
    late = datetime.now(UTC) + timedelta(hours=6.5)
    assert client.cancel_all(correlation_id=group, execute_after=late) == 1
    assert client.cancel_all(correlation_id=group, limit=3) == 3
    assert client.cancel_all(correlation_id=group) == 3
    assert client.cancel_all(correlation_id=group) == 0
    assert client.count(correlation_id=group, status="canceled").timers == 7
    assert client.cancel_all(id=other.id, namespace="default") == 1 and client.get(other.id).status == "canceled"
    for limit in (0, -1):
        with pytest.raises(InvalidRequest):
            client.cancel_all(correlation_id=group, limit=limit)
    with pytest.raises(InvalidRequest, match='namespace="\\*"'):
        client.cancel_all()
    assert client.cancel_all(namespace="*", id=client.create(delay="1h", callback_url=URL).id) == 1


def test_replay_all_replays_up_to_the_limit_by_filter(
    client: Client, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = fresh()
    url = receiver.reply(f"/{group}", Reply(status=500))
    for _ in range(3):
        client.create(delay="0s", callback_url=url, correlation_id=group, retry_policy={"max_retries": 0})
    until("they failed", lambda: len(list(client.list(correlation_id=group, status="failed"))) == 3)
    assert client.replay_all(correlation_id=group, status="completed") == 0
    assert client.replay_all(correlation_id=group, limit=2) == 2
    until("all failed", lambda: client.count(correlation_id=group, status="failed").timers == 3)
    receiver.wait(f"/{group}", 5)
    receiver.reply(f"/{group}", Reply())  # only now: the receiver picks its reply after it has counted the request
    monkeypatch.setattr(calls, "BULK_MAX", 1)
    assert client.replay_all(correlation_id=group, limit=3) == 3
    receiver.wait(f"/{group}", 8)
    until("they completed", lambda: client.count(correlation_id=group, status="completed").timers == 3)


def test_namespaces_and_secrets_can_be_created_changed_and_deleted(client: Client) -> None:
    name = fresh()
    made = client.create_namespace(name, shards=4, retention=timedelta(days=3))
    assert (made.name, made.shards, made.retention, made.paused, made.secrets) == (name, 4, "3d", False, [])
    assert client.create_namespace(name, shards=4, retention="3d") == made
    with pytest.raises(Conflict):
        client.create_namespace(name, shards=5)
    assert client.pause(name).paused and client.namespace(name).paused and not client.resume(name).paused
    assert client.update_namespace(name, retention="forever").retention == "forever"
    assert made.weight == 1 and client.update_namespace(name, weight=3).weight == 3
    secret = client.add_secret(name)
    assert secret.secret.startswith("whsec_")
    assert [each.id for each in client.namespace(name).secrets] == [secret.id]
    client.delete_secret(name, secret.id)
    assert name in [each.name for each in client.namespaces()]
    with pytest.raises(NotFound) as error:
        client.namespace(fresh())
    assert error.value.code == "NAMESPACE_NOT_FOUND"


def test_namespace_weight_can_be_set_and_changed(client: Client) -> None:
    name = fresh()
    made = client.create_namespace(name, weight=100)
    assert made.weight == 100
    assert client.create_namespace(name) == client.create_namespace(name, weight=100) == made
    with pytest.raises(Conflict):
        client.create_namespace(name, weight=99)
    assert client.update_namespace(name, retention="3d").weight == 100
    assert client.update_namespace(name, weight=2).retention == "3d"
    assert client.namespace(name).weight == 2
    assert {each.name: each.weight for each in client.namespaces()}[name] == 2
    for weight in (0, 101):
        with pytest.raises(InvalidRequest) as error:
            client.update_namespace(name, weight=weight)
        assert error.value.details["field"] == "weight"
    with pytest.raises(InvalidRequest) as error:
        client.create_namespace(fresh(), weight=101)
    assert error.value.details["field"] == "weight"


def test_overview_and_cluster_describe_the_service(client: Client) -> None:
    client.create(delay="1h", callback_url=URL)
    overview = client.overview()
    assert overview.statuses[Status.PENDING] >= 0 and set(overview.statuses) == set(Status)
    assert overview.now - overview.since >= timedelta(0) and overview.overdue.timers >= 0
    assert len(overview.forecast.hour) == 60 and len(overview.forecast.day) == 24
    cluster = client.cluster()
    assert [each.id for each in cluster.instances] == [each.id for each in overview.instances]
    assert cluster.shards == overview.shards and cluster.abilities is not None


def test_health_needs_no_key(make: Callable[..., Client], url: str) -> None:
    health = make(url, "a wrong key").health()
    assert health.status == "up" and abs(datetime.now(UTC) - health.timestamp) < timedelta(minutes=1)


@pytest.mark.parametrize(
    ("new", "field"),
    [
        ({"execute_at": datetime(2030, 1, 1), "callback_url": URL}, "executeAt"),
        ({"execute_at": datetime(1960, 1, 1, tzinfo=UTC), "callback_url": URL}, "executeAt"),
        ({"execute_at": "2001-01-01T00:00:00Z", "callback_url": URL}, "executeAt"),
        ({"delay": "soon", "callback_url": URL}, "delay"),
        ({"delay": timedelta(seconds=-1), "callback_url": URL}, "delay"),
        ({"delay": "1s"}, "callbackUrl"),
        ({"delay": "1s", "callback_url": URL, "retry_policy": {"max_interval": "x"}}, "retryPolicy.maxInterval"),
    ],
)
def test_error_names_the_invalid_field(client: Client, new: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        client.create(**new)
    assert error.value.details == {"field": field} and error.value.code == "INVALID_INPUT"
    assert isinstance(error.value, DuetimeClientError) and error.value.message == str(error.value)


@pytest.mark.parametrize(
    ("sent", "raised"),
    [
        ("executeAt is required unless delay is given", "execute_at is required unless delay is given"),
        ("callbackUrl can't be used with callbackSubject", "callback_url can't be used with callback_subject"),
        ('say "namespace": "*" for all', 'say namespace="*" for all'),
        ("retryPolicy.maxInterval must be longer", "retry_policy.max_interval must be longer"),
        ("executeAfter, then executeBefore: a nextCursor", "execute_after, then execute_before: a next_cursor"),
        ("'executeAt' and \"callbackUrl\" are values", "'executeAt' and \"callbackUrl\" are values"),
        ('must be like {"advance": "3d"} or {"ok": true}', 'must be like {"advance": "3d"} or {"ok": true}'),
        ("someWord is no field, nor is myexecuteAt", "someWord is no field, nor is myexecuteAt"),
    ],
)
def test_messages_name_the_arguments_of_the_client(sent: str, raised: str) -> None:
    details = {"field": "executeAt"}
    for code in ("INVALID_INPUT", "UNSUPPORTED"):
        error = error_of(400, Failure(code, sent, details))
        assert isinstance(error, InvalidRequest) and str(error) == error.message == raised and error.details == details
    # Other messages are about timers, whose ids could look like a field.
    assert error_of(404, Failure("TIMER_NOT_FOUND", sent)).message == sent


def test_rejected_arguments_are_named_as_in_python(client: Client) -> None:
    wrong: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"callback_url": URL}, ("execute_at", "delay")),
        ({"delay": "1s"}, ("callback_url", "callback_subject")),
        ({"delay": "1s", "callback_url": URL, "callback_timeout": "0s"}, ("callback_timeout",)),
        ({"delay": "1s", "callback_url": URL, "retry_policy": {"max_retries": -1}}, ("retry_policy.max_retries",)),
    ]
    for new, names in wrong:
        with pytest.raises(InvalidRequest) as error:
            client.create(**new)
        assert all(name in str(error.value) for name in names), error.value
        [result] = client.batch([new])  # type: ignore[list-item]
        assert isinstance(result, InvalidRequest) and str(result) == str(error.value)


def test_invalid_arguments_raise_before_anything_is_sent(client: Client) -> None:
    for wrong in (
        lambda: client.get(""),
        lambda: client.namespace(""),
        lambda: client.get("\udcff"),
        lambda: client.page(namespace="\udcff"),
        lambda: client.create(delay="1h", callback_url=URL, payload="\udcff"),
    ):
        with pytest.raises(InvalidRequest):
            wrong()
    for wrong in (
        lambda: client.create(delay="1h", callback_ulr=URL),  # type: ignore[call-arg]
        lambda: client.create(delay="1h", callback_url=URL, retry_policy={"retries": 1}),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError):
            wrong()


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ({"delay": 5}, 'delay must be a timedelta or a duration such as "5s", not 5'),
        ({"delay": 0.5}, 'delay must be a timedelta or a duration such as "30s", not 0.5'),
        (
            {"delay": "1s", "callback_timeout": 30},
            'callback_timeout must be a timedelta or a duration such as "30s", not 30',
        ),
        (
            {"delay": "1s", "retry_policy": {"max_interval": 60}},
            'max_interval must be a timedelta or a duration such as "60s", not 60',
        ),
        ({"execute_at": 5}, 'execute_at must be a datetime or a time such as "2030-01-31T09:00:00Z", not 5'),
    ],
)
def test_arguments_of_the_wrong_type_are_explained(client: Client, new: Any, message: str) -> None:
    with pytest.raises(TypeError) as error:
        client.create(callback_url=URL, **new)
    assert str(error.value) == message
    with pytest.raises(TypeError, match="execute_after must be a datetime"):
        client.count(execute_after=5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="retention must be a timedelta"):
        client.create_namespace("x", retention=5)  # type: ignore[arg-type]


def test_give_up_on_is_sent_only_when_given() -> None:
    def sent(policy: Any) -> Any:
        return json.loads(calls.create(delay="1s", callback_url=URL, retry_policy=policy).body or b"")["retryPolicy"]

    assert sent({"give_up_on": [400, 404]}) == {"giveUpOn": [400, 404]}
    body = b"""{"maxRetries": 1, "maxRetryAttemptsDuration": "1s", "initialInterval": "1s", "backoffMultiplier": 1.0,
        "maxInterval": "1s", "jitter": false}"""
    policy = decode(body, RetryPolicy)
    assert policy.give_up_on is None and sent(policy) == json.loads(body)
    body = body.replace(b"}", b', "giveUpOn": [410]}')
    policy = decode(body, RetryPolicy)
    assert policy.give_up_on == (410,) and sent(policy) == json.loads(body)


def test_body_over_the_limit_raises_an_error(client: Client) -> None:
    with pytest.raises(InvalidRequest) as error:
        client.create(delay="1h", callback_url=URL, payload="x" * 20_000_000)
    assert (error.value.code, error.value.status) == ("PAYLOAD_TOO_LARGE", 413)
    assert client.health().status == "up"


def test_large_page_is_read_completely(client: Client) -> None:
    group = fresh()
    client.batch([{"delay": "1h", "callback_url": URL, "correlation_id": group, "payload": "x" * 200_000}] * 12)
    assert len(client.page(correlation_id=group).timers) == 12


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ({"callbackUrl": URL}, "callback_url"),
        ({"url": URL}, "callback_url"),
        ({"delay_ms": 5}, "delay"),
        ({"maxRetries": 3}, 'retry_policy={"max_retries": …}'),
        ({"retry_policy": {"retries": 3}}, "max_retries"),
    ],
)
def test_unknown_field_gets_a_suggestion(make: Callable[..., Client], wrong: dict[str, Any], meant: str) -> None:
    with pytest.raises(TypeError) as error:
        make("http://localhost:1", KEY).create(**wrong)
    assert str(error.value).endswith(f"; did you mean {meant}?")


def test_wrong_argument_is_explained(make: Callable[..., Client]) -> None:
    client: Any = make("http://localhost:1", KEY)
    with pytest.raises(TypeError, match=r"^list\(\) got an unexpected keyword argument 'state'"):
        client.list(state="failed")
    with pytest.raises(TypeError, match=r"^id must be a str such as timer\.id, not int$"):
        client.get(5)
    with pytest.raises(TypeError, match=r"^a timer has no field 'x'$"):
        client.update("a", x=1)


def test_key_comes_from_the_argument_the_environment_or_the_file(
    make: Callable[..., Client], url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert exchange.KEY_FILE == keyfile.KEY_FILE
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("API_KEY", raising=False)
    with pytest.raises(Unauthorized) as error:
        make(url).namespaces()
    assert error.value.code == "UNAUTHORIZED" and error.value.status == 401
    assert str(tmp_path) in str(error.value) and "API_KEY" in str(error.value)
    (tmp_path / "duetime.key").write_text(KEY + "\n")
    assert make(url).namespaces()
    monkeypatch.setenv("API_KEY", "x" * 40)
    with pytest.raises(Unauthorized):
        make(url).namespaces()
    monkeypatch.setenv("TIMER_URL", url + "/")
    assert make(key=KEY).namespaces()


@pytest.mark.parametrize("bad", ["localhost:3000", "ftp://x", "http://", "http://a:b", "http://u:p@h", "http://h/?q"])
def test_invalid_url_is_rejected(make: Callable[..., Client], bad: str) -> None:
    with pytest.raises(InvalidRequest, match="not the address of a service"):
        make(bad)


@pytest.mark.parametrize("bad", ["http://h/api/v1", "http://h/proxy/api/v1/"])
def test_url_of_the_api_is_rejected(make: Callable[..., Client], bad: str) -> None:
    with pytest.raises(InvalidRequest, match="give the address without /api/v1"):
        make(bad)


def test_threads_share_a_client(service: Duetime, url: str) -> None:
    group = fresh()
    with Client(url, KEY) as client:

        def work() -> None:
            for _ in range(20):
                timer = client.create(delay="1h", callback_url=URL, correlation_id=group)
                assert client.get(timer.id).id == timer.id

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({timer.id for timer in client.list(correlation_id=group)}) == 160


def test_to_json_equals_the_json_of_the_server(client: Client, service: Duetime) -> None:
    timer = client.create(id=fresh(), delay="1h30m", callback_url=URL, payload={"n": 10**25}, callback_timeout="1m5s")
    answer = service.request("GET", f"/api/v1/timers/default/{timer.id}", headers={"X-API-Key": KEY})
    assert json.loads(to_json(timer)) == answer.body
