"""Tells the story of a request for its log line: model, tenant, tokens, times, workers and its end."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.broker.ingress.journey import Journey
from headrace.frontend.generation.plan import Plan
from headrace.frontend.metrics import Level

DIGITS = 4  # of seconds


class RequestStory:
    """Gathers references while the request runs. Its fields are made when it has ended, and only if they are logged."""

    __slots__ = ("_journeys", "_plan", "first_token_s", "level")

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._journeys: Sequence[Journey | None] = ()
        self.first_token_s: float | None = None  # since the request came
        self.level: Level | None = None  # by the targets; None = not judged

    @property
    def model(self) -> str:
        """The name of its model in metrics."""
        return self._plan.jobs[0].card.model

    def used(self) -> tuple[int, int]:
        """Return the tokens of its prompts and answers, none of a request that was not answered."""
        counter = self._plan.counter
        return (counter.prompt, counter.completion) if counter.completion or counter.ended else (0, 0)

    def submitted(self, journeys: Sequence[Journey | None]) -> None:
        """Take the journeys of its jobs."""
        self._journeys = journeys

    @property
    def journeys(self) -> list[Journey]:
        """The journeys of its jobs, as far as its ingress keeps them."""
        return [journey for journey in self._journeys if journey is not None]

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
        journeys = self.journeys
        if len(journeys) == 1:
            journey = journeys[0]
            _add(fields, journey.queue_s, journey.workers, journey.attempts, journey.finish_reasons)
        elif journeys:
            waits = [journey.queue_s for journey in journeys if journey.queue_s is not None]
            _add(
                fields,
                max(waits, default=None),
                list(dict.fromkeys(worker for journey in journeys for worker in journey.workers)),
                max(journey.attempts for journey in journeys),
                list(dict.fromkeys(reason for journey in journeys for reason in journey.finish_reasons)),
            )
        return fields


def _add(
    fields: dict[str, object], queue_s: float | None, workers: list[str], attempts: int, finish_reasons: list[str]
) -> None:
    if queue_s is not None:
        fields["queue_s"] = round(queue_s, DIGITS)
    if workers:
        fields["workers"], fields["attempts"] = workers, attempts
    if finish_reasons:
        fields["finish_reason"] = ",".join(finish_reasons)
