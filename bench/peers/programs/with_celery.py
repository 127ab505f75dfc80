"""Celery with Redis as broker: tasks with an ETA, acknowledged once done (``acks_late``), so that none is lost with a
worker, and with a visibility timeout longer than any ETA, as its pages on Redis ask.

Results are ignored. Its worker has a process for each core, which is its default.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime

import celery
import requests
from celery.signals import worker_ready
from program import HEADERS, Timer, body_of, client, due_at, working

CALLERS = 4
TWO_DAYS = 2 * 86_400

role, url = sys.argv[1:]
app = celery.Celery("peers", broker=url)
app.conf.update(
    broker_transport_options={"visibility_timeout": TWO_DAYS},
    broker_connection_retry_on_startup=True,
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_ignore_result=True,
    worker_hijack_root_logger=False,
    worker_redirect_stdouts=False,
)
http = requests.Session()


@app.task(name="post")
def post(url: str, payload: dict[str, object]) -> None:
    http.post(url, data=body_of({"payload": payload}), headers=HEADERS, timeout=30).raise_for_status()


def schedule(timer: Timer) -> None:
    post.apply_async(kwargs=timer, eta=datetime.fromtimestamp(due_at(timer), UTC))


def left() -> int:
    """What waits in the queue, and what workers have and did not acknowledge."""
    with app.connection_for_read() as connection:
        redis = connection.default_channel.client
        return int(redis.llen("celery") + redis.hlen("unacked"))


if role == "client":
    client(celery.__version__, schedule=schedule, left=left, threads=CALLERS)
else:
    worker_ready.connect(lambda **_: working(), weak=False)
    app.worker_main(["worker", "--without-gossip", "--without-mingle", "--loglevel", "ERROR"])
