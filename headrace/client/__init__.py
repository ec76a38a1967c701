"""Submits jobs to Headrace from Python and reads their results: a client that speaks NATS and needs no HTTP.

    from headrace.client import connect

    async with connect("nats://127.0.0.1:4222") as hr:
        job = await hr.submit({"model": "m", "messages": [{"role": "user", "content": "hello"}]}, id="greeting")
        print((await job.result()).text)

`headrace.client.sync` has the same without asyncio.
"""

from headrace.client.client import Client, ClientOptions, Job, Request, connect
from headrace.client.errors import ClientError, JobFailed, NotAllowed, NotConfirmed, NotSubmitted, ResultTimeout, UnknownJob
from headrace.client.results import Result

__all__ = [
    "Client",
    "ClientError",
    "ClientOptions",
    "Job",
    "JobFailed",
    "NotAllowed",
    "NotConfirmed",
    "NotSubmitted",
    "Request",
    "Result",
    "ResultTimeout",
    "UnknownJob",
    "connect",
]
