"""Keeps the stored message and the stream of each open request, so that the ingress can submit the request again."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from headrace.broker.codec import decode
from headrace.broker.ingress.stream import JobStream
from headrace.broker.messages import Envelope


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
        """Decode the stored message."""
        return decode(Envelope, self.body)


class OpenJobs:
    """Open requests by id."""

    def __init__(self) -> None:
        self._jobs: dict[str, OpenJob] = {}
        self._removed: Callable[[str], None] = lambda _request_id: None

    def __iter__(self) -> Iterator[OpenJob]:
        return iter(list(self._jobs.values()))

    def __len__(self) -> int:
        return len(self._jobs)

    def on_removed(self, callback: Callable[[str], None]) -> None:
        """Call `callback` with the id of each request that is dropped."""
        self._removed = callback

    def add(self, job: OpenJob) -> None:
        """Keep an open request."""
        self._jobs[job.id] = job

    def get(self, request_id: str) -> OpenJob | None:
        """Return the request with this id, or None if it is not open."""
        return self._jobs.get(request_id)

    def find(self, name: str, tenant: str) -> list[OpenJob]:
        """Return the tenant's requests with this id or name. Searches all open requests, because cancelling is rare."""
        return [job for job in self._jobs.values() if name in (job.id, job.name) and job.tenant == tenant]

    def remove(self, request_id: str) -> None:
        """Drop a request. An unknown id is fine."""
        if self._jobs.pop(request_id, None) is not None:
            self._removed(request_id)
