"""What an ingress keeps of each open request beside the judge's record: enough to submit it again."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from headrace.broker.codec import decode
from headrace.broker.ingress.stream import JobStream
from headrace.broker.messages import Envelope


class OpenJob(msgspec.Struct, frozen=True):
    """`body` is the stored message; `deadline_s` is loop time, `deadline` Unix time."""

    id: str
    pool: str
    tenant: str
    body: bytes
    stream: JobStream
    deadline_s: float
    deadline: float
    name: str = ""  # what its client calls it

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

    def called(self, name: str, tenant: str) -> list[OpenJob]:
        """Those of this tenant that have this id or name. A look at all of them: cancelling is rare."""
        return [job for job in self._jobs.values() if name in (job.id, job.name) and job.tenant == tenant]

    def remove(self, request_id: str) -> None:
        self._jobs.pop(request_id, None)
