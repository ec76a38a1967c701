"""Ends requests from the ingress's side: cancelled, withdrawn by a call, past their deadline, or not read in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import msgspec
import structlog

from headrace.broker import metrics
from headrace.broker.codec import decode, encode, log_ids
from headrace.broker.errors import BrokerUnavailable, WireError
from headrace.broker.ingress.stream import JobStream
from headrace.broker.membership.members import Members
from headrace.broker.messages.control import CancelJob, Done
from headrace.broker.messages.events import Cancel
from headrace.broker.messages.frames import JobFault
from headrace.broker.messages.requests import Envelope
from headrace.broker.protocol.judge import Judge
from headrace.jetstream.errors import JetStreamError, NoResponder
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects


class OpenJob(msgspec.Struct, frozen=True):
    """An open request. `body` is the stored message; `deadline_s` is loop time, `deadline` Unix time."""

    id: str
    pool: str
    tenant: str
    body: bytes
    stream: JobStream
    deadline_s: float
    deadline: float
    name: str = ""  # the client's own name for the request

    def envelope(self) -> Envelope:
        return decode(Envelope, self.body)


class OpenJobs:
    def __init__(self) -> None:
        self._jobs: dict[str, OpenJob] = {}
        self._removed: Callable[[str], None] = lambda _request_id: None

    def __iter__(self) -> Iterator[OpenJob]:
        return iter(list(self._jobs.values()))

    def __len__(self) -> int:
        return len(self._jobs)

    def on_removed(self, callback: Callable[[str], None]) -> None:
        self._removed = callback

    def add(self, job: OpenJob) -> None:
        self._jobs[job.id] = job

    def get(self, request_id: str) -> OpenJob | None:
        return self._jobs.get(request_id)

    def find(self, name: str, tenant: str) -> list[OpenJob]:
        """Return the tenant's requests with this id or name. Searches all open requests, because cancelling is rare."""
        return [job for job in self._jobs.values() if name in (job.id, job.name) and job.tenant == tenant]

    def remove(self, request_id: str) -> None:
        if self._jobs.pop(request_id, None) is not None:
            self._removed(request_id)


log = structlog.get_logger()


class Canceller:
    def __init__(
        self, messaging: Messaging, subjects: Subjects, judge: Judge, open_jobs: OpenJobs, members: Members, *, own: str
    ) -> None:
        self._messaging = messaging
        self._subjects = subjects
        self._judge = judge
        self._open = open_jobs
        self._members = members
        self._own = own
        self._unsent: dict[str, list[str]] = {}  # pool → ids cancelled in this turn of the event loop

    def end(self, request_id: str, fault: JobFault, *, cause: str) -> None:
        """End a request at this ingress and broadcast that to its pool. A request that has ended is left alone."""
        record = self._judge.close(request_id, fault)
        if record is None:
            return
        metrics.CANCELLED.labels(cause).inc()
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._broadcast)
        self._unsent.setdefault(record.pool, []).append(request_id)

    def _broadcast(self) -> None:
        for pool, ids in self._unsent.items():
            self._messaging.send(self._subjects.cancel(pool), encode(Cancel(ids=ids)))
        self._unsent.clear()

    def withdraw(self, name: str, tenant: str) -> int:
        """End the tenant's requests that have this id or name at this ingress. Returns their number."""
        open_now = [job for job in self._open.find(name, tenant) if self._judge.get(job.id) is not None]
        for job in open_now:
            log.info("job.withdrawn", **log_ids(job))
            self.end(job.id, JobFault("request_cancelled", "the request was cancelled by a call"), cause="call")
        return len(open_now)

    async def everywhere(self, name: str, tenant: str, *, timeout_s: float) -> bool:
        """End the tenant's requests with this id or name here or, if there are none, at the other ingresses.

        Returns False if no ingress had such a request. Raises BrokerUnavailable if some ingress could not be asked and no other
        one had such a request.
        """
        if self.withdraw(name, tenant):
            return True
        others = [ingress for ingress in self._members.ingresses() if ingress != self._own]
        question = encode(CancelJob(name=name, tenant=tenant))
        answers = await asyncio.gather(*(self._ask(ingress, question, timeout_s) for ingress in others))
        if any(answers):
            return True
        if None in answers or not self._messaging.connected:
            raise BrokerUnavailable("not every frontend could be asked whether it has this request; try again shortly")
        return False

    async def _ask(self, ingress: str, question: bytes, timeout_s: float) -> bool | None:
        subject = self._subjects.judge(ingress)
        try:
            return decode(Done, await self._messaging.request(subject, question, timeout_s=timeout_s)).ok
        except NoResponder:
            return False  # its process is gone, and its requests with it
        except (JetStreamError, WireError):
            return None
