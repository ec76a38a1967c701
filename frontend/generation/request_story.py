"""Tells the story of a request for its log line: model, tenant, tokens, times, workers and its end."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.broker.ingress.journey import Journey
from headrace.frontend.generation.plan import Plan

DIGITS = 4  # of seconds


class RequestStory:
    """Gathers references while the request runs. Its fields are made when it has ended, and only if they are logged."""

    __slots__ = ("_journeys", "_plan", "first_token_s")

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._journeys: Sequence[Journey] = ()
        self.first_token_s: float | None = None  # since the request came

    def submitted(self, journeys: Sequence[Journey | None]) -> None:
        """Take the journeys of its jobs."""
        self._journeys = [journey for journey in journeys if journey is not None]

    def fields(self) -> dict[str, object]:
        """Return the fields; those that are not known are left out."""
        jobs, counter = self._plan.jobs, self._plan.counter
        job = jobs[0]
        fields: dict[str, object] = {"model": job.adapter or job.card.model, "tenant": job.tenant, "class": job.request_class}
        if len(jobs) > 1:
            fields["jobs"] = len(jobs)
        fields["prompt_tokens"] = counter.prompt
        if counter.ended:
            fields["cached_tokens"] = counter.cached
        fields["completion_tokens"] = counter.completion
        if self.first_token_s is not None:
            fields["ttft_s"] = round(self.first_token_s, DIGITS)
        return fields | self._travelled()

    def _travelled(self) -> dict[str, object]:
        journeys = self._journeys
        fields: dict[str, object] = {}
        waits = [journey.queue_s for journey in journeys if journey.queue_s is not None]
        if waits:
            fields["queue_s"] = round(max(waits), DIGITS)
        workers = list(dict.fromkeys(worker for journey in journeys for worker in journey.workers))
        if workers:
            fields["workers"] = workers
            fields["attempts"] = max(journey.attempts for journey in journeys)
        reasons = dict.fromkeys(reason for journey in journeys for reason in journey.finish_reasons)
        if reasons:
            fields["finish_reason"] = ",".join(reasons)
        return fields
