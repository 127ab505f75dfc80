"""APScheduler 3 with its jobs in PostgreSQL (``SQLAlchemyJobStore``), as its user guide advises for jobs that must
outlive the process. Its store is one process's own, so jobs are added where they run.

A thread pool runs the jobs, as large as its default: more threads only wait for each other. What the store does is one
statement each, so the engine commits by itself and saves the round trips. No misfire is too late to run: the default
would drop what is late by a second.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from importlib.metadata import version

import requests
import sqlalchemy
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore
from apscheduler.schedulers.background import BackgroundScheduler
from program import HEADERS, Timer, body_of, client, due_at

THREADS = 10
CALLERS = 8

http = requests.Session()
http.mount("http://", requests.adapters.HTTPAdapter(pool_maxsize=THREADS))


def post(url: str, payload: dict[str, object]) -> None:
    http.post(url, data=body_of({"payload": payload}), headers=HEADERS, timeout=30).raise_for_status()


def main() -> None:
    role, url = sys.argv[1:]
    address = url.replace("postgresql://", "postgresql+psycopg://")
    engine = sqlalchemy.create_engine(address, pool_size=CALLERS + 2, isolation_level="AUTOCOMMIT")
    scheduler = BackgroundScheduler(
        jobstores={"default": SQLAlchemyJobStore(engine=engine)},
        executors={"default": ThreadPoolExecutor(THREADS)},
        job_defaults={"misfire_grace_time": None},
        timezone=UTC,
    )
    scheduler.start(paused=role == "client")

    def schedule(timer: Timer) -> None:
        scheduler.add_job(post, "date", run_date=datetime.fromtimestamp(due_at(timer), UTC), kwargs=timer)

    def left() -> int:
        with engine.connect() as connection:
            return int(connection.execute(sqlalchemy.text("SELECT count(*) FROM apscheduler_jobs")).scalar_one())

    client(version("apscheduler"), schedule=schedule, left=left, threads=CALLERS)


if __name__ == "__main__":
    # Jobs are kept by the name of their function, which must not be one of "__main__".
    import with_apscheduler

    with_apscheduler.main()
