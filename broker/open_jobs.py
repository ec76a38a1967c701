"""What an ingress keeps of each open request beside the judge's record: enough to submit it again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from broker.codec import decode
from broker.messages import Envelope
from broker.stream import JobStream


@dataclass(frozen=True, slots=True)
class OpenJob:
    """`body` is the stored message; `deadline_s` is loop time, `deadline` Unix time."""

    id: str
    pool: str
    tenant: str
    body: bytes
    stream: JobStream
    deadline_s: float
    deadline: float

    def envelope(self) -> Envelope:
        return decode(Envelope, self.body)


class OpenJobs:
    """Open requests by id."""

    def __init__(self) -> None:
        self._jobs: dict[str, OpenJob] = {}

    def __iter__(self) -> Iterator[OpenJob]:
        return iter(list(self._jobs.values()))

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: OpenJob) -> None:
        self._jobs[job.id] = job

    def get(self, request_id: str) -> OpenJob | None:
        return self._jobs.get(request_id)

    def remove(self, request_id: str) -> None:
        self._jobs.pop(request_id, None)
