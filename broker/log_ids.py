"""Names a request in log lines, in every process by the same fields."""

from __future__ import annotations

from typing import Protocol


class LoggedRequest(Protocol):
    """A request in any form (`Job`, `Envelope`, `OpenJob`, …). `name` is its client's own id of it, or empty."""

    @property
    def id(self) -> str: ...
    @property
    def name(self) -> str: ...


def log_ids(job: LoggedRequest) -> dict[str, str]:
    """Return `request_id` and, where the client gave one, `client_request_id`."""
    return {"request_id": job.id, "client_request_id": job.name} if job.name else {"request_id": job.id}
