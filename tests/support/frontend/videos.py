"""A frontend that makes videos over a fake ingress and stored jobs in memory."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.types import ASGIApp

from headrace.broker.jobs import Job
from headrace.broker.messages.durable import JobResult
from headrace.broker.messages.frames import JobFault
from headrace.broker.messages.requests import Picture
from headrace.frontend.apis import Stores
from headrace.frontend.app import build_frontend
from headrace.frontend.settings import FrontendSettings
from tests.support.frontend.fakes import CARD, FILES, MODEL, Call, FakeIngress, FakeServed, Step, end, frontend, row
from tests.support.frontend.responses_store import MemoryRecords
from tests.support.frontend.stored_jobs import MemoryJobs
from tests.support.painter import mp4

PATH = "/v1/videos"
FILE = mp4(Picture(prompt="x", width=96, height=64), seconds=2)


class Studio:
    """The frontend, its jobs and records. `carry` runs the job that was stored last; `runs` has what carriers submitted."""

    def __init__(self, kinds: Iterable[str] = ("video",)) -> None:
        self.runs: list[Job] = []
        self.ingress = FakeIngress(self._film)
        self.ingress.models.served = {MODEL: FakeServed(msgspec.structs.replace(CARD, kinds=list(kinds)), FILES)}
        self.jobs = MemoryJobs()
        self.records = MemoryRecords()
        stores = Stores(jobs=self.jobs, records=self.records)
        self.frontend = build_frontend(self.ingress, FrontendSettings(), stores=stores)

    def _film(self, job: Job) -> Iterable[Step]:
        self.runs.append(job)
        yield [row(ids=[], fin=end(prompt_tokens=job.prompt_tokens, vector=FILE))]

    def bare(self) -> ASGIApp:
        """Return a frontend of the same models without stores."""
        return frontend(self.ingress).app

    async def call(self, path: str, body: Any = None, **options: Any) -> Call:
        return await Call(self.frontend.app, path, body, **options).run()

    async def ask(self, *, headers: dict[str, str] | None = None, **body: Any) -> Call:
        """Ask for a video, in JSON."""
        return await self.call(PATH, json.dumps({"model": MODEL, **body}).encode(), headers=headers or {})

    async def ask_form(self, fields: dict[str, str], file: tuple[str, bytes] | None = None) -> Call:
        """Ask for a video by a form."""
        parts = [f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n' for name, value in fields.items()]
        body = "".join(parts).encode()
        if file is not None:
            head = f'--b\r\nContent-Disposition: form-data; name="{file[0]}"; filename="f.png"\r\n\r\n'
            body += head.encode() + file[1] + b"\r\n"
        return await self.call(PATH, body + b"--b--\r\n", headers={"content-type": "multipart/form-data; boundary=b"})

    async def get(self, below: str, *, method: str = "GET", **headers: str) -> Call:
        """Ask for what is below the route of videos; a query begins with a question mark."""
        path = PATH + (below if not below or below.startswith("?") else f"/{below}")
        path, _, query = path.partition("?")
        call = Call(self.frontend.app, path, method=method, headers=headers)
        call.scope["query_string"] = query.encode()
        return await call.run()

    def begin(self) -> None:
        """Take the job that was stored last, as a carrier does."""
        job = self.jobs.job()
        self.jobs.append(job.tenant, job.token, "take", carrier="i-1")

    async def carry(self, fault: JobFault | None = None) -> None:
        """Run the job that was stored last, up to its end."""
        await self.jobs.carry(self.frontend.renderer, self.ingress, fault)

    def result(self) -> JobResult:
        """The result of the job that was stored last."""
        job = self.jobs.job()
        return self.jobs.results[job.tenant, job.token]

    def picture(self) -> Picture:
        """What the last run asked for."""
        pooling = self.runs[-1].pooling
        assert pooling is not None
        assert pooling.picture is not None
        return pooling.picture
