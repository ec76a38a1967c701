"""Tells the story of a request as a text: what happened when, where the time went, and why each worker was chosen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from headrace.broker.messages import Decided, Routed, Story, StoryEvent
from headrace.commands.explain import explained

BAR = 60  # characters of the timeline

StageName = Literal["queue", "prefill", "transfer", "decode", "move"]
MARKS: dict[StageName, str] = {"queue": ".", "prefill": "=", "transfer": ">", "decode": "#", "move": "!"}


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a request's life. Times are seconds since its submission."""

    name: StageName
    begin_s: float
    end_s: float
    worker: str = ""

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


def in_order(story: Story) -> list[StoryEvent]:
    """Return the events in order. A placement is told after the start where a worker places a request on itself."""
    started = {event.attempt: event.after_s for event in story.events if event.kind == "started"}

    def key(event: StoryEvent) -> tuple[float, bool]:
        placed = event.kind == "placed"
        return min(event.after_s, started.get(event.attempt, event.after_s)) if placed else event.after_s, not placed

    return sorted(story.events, key=key)


def stages(story: Story, now_s: float) -> list[Stage]:
    """Return the stages of a request, one behind the other, from its submission to its end or, if it is open, `now_s`.

    It waits until an attempt has started, is in prefill until that attempt's first token and in decode until it ends or moves.
    Events of older attempts that come late change nothing.
    """
    found: list[Stage] = []
    name: StageName = "queue"
    begin_s, worker, attempt = 0.0, "", 0

    def close(at_s: float, following: StageName, its_worker: str) -> None:
        nonlocal name, begin_s, worker
        found.append(Stage(name, begin_s, at_s, worker))
        name, begin_s, worker = following, at_s, its_worker

    last_s = story.ended_s if story.ended_s is not None else now_s
    for event in in_order(story):
        at_s = max(begin_s, min(event.after_s, last_s))  # the last events are heard after the end
        if event.kind == "started" and event.attempt > attempt:
            attempt = event.attempt
            close(at_s, "prefill", event.worker)
        elif event.kind == "prefilled" and event.attempt == attempt and name == "prefill":
            if event.fetch_ms:
                close(max(begin_s, at_s - event.fetch_ms / 1e3), "transfer", event.worker)
            close(at_s, "decode", event.worker)
        elif event.kind == "moved" and event.attempt >= attempt and name in ("prefill", "decode"):
            close(at_s, "move", "")
    return [*found, Stage(name, begin_s, max(begin_s, last_s), worker)]


def timeline(parts: Sequence[Stage], width: int = BAR) -> str:
    """Draw the stages to scale in one line; a stage that is not empty has a character at least."""
    total = parts[-1].end_s
    if total <= 0:
        return ""
    drawn, at = "", 0
    for part in parts:
        length = round(part.end_s / total * width) - at  # ends are rounded, so that errors do not add up
        drawn += MARKS[part.name] * max(length, 1 if part.seconds > 0 else 0)
        at = len(drawn)
    return drawn


def story_text(story: Story, decided: Iterable[Decided], now_s: float) -> str:
    """Return the story of one request, with the reasons of the placements that routers remember."""
    parts = stages(story, now_s)
    lines = [f"{story.id}: {_end(story)}", *_about(story), ""]
    lines.append(_line(0.0, f"submitted to frontend {story.ingress}"))
    lines += [_line(event.after_s, _told(event, story)) for event in in_order(story)]
    if story.lost_events:
        lines.append(f"            and {story.lost_events} events more")
    if story.ended_s is not None:
        lines.append(_line(story.ended_s, _end(story)))
    lines += ["", f"  {timeline(parts)}", f"  {_sums(parts)}"]
    for one in decided:
        lines += ["", *explained(one).rstrip().splitlines()]
    return "\n".join(lines) + "\n"


def placements_text(name: str, records: Sequence[Routed]) -> str:
    """Return what is left of a request that no frontend remembers: the stored records of its placements."""
    lines = [f"{name}: no frontend remembers it; its placements were stored:"]
    for one in sorted(records, key=lambda record: (record.at, record.attempt)):
        at = datetime.fromtimestamp(one.at, UTC).isoformat(timespec="milliseconds")
        cached = max(0, one.tokens - one.uncached)
        lines.append(
            f"  {at}  attempt {one.attempt} on {one.worker} by {one.router or 'itself'}, {one.tokens} prompt tokens "
            f"({cached} cached by prediction), waited {one.waited_s:.3f} s" + (f", reason {one.reason}" if one.reason else "")
        )
    return "\n".join(lines) + "\n"


def _about(story: Story) -> list[str]:
    at = datetime.fromtimestamp(story.submitted, UTC).isoformat(timespec="milliseconds")
    served = f"model {story.model}" + (f", adapter {story.adapter}" if story.adapter else "")
    lines = [f"  {served}, pool {story.pool}, tenant {story.tenant}, class {story.request_class}, submitted {at}"]
    if story.name:
        lines.append(f"  the client's id is {story.name}")
    tokens = f"  {story.prompt_tokens} prompt tokens, {story.answer_tokens} of at most {story.max_tokens} answer tokens"
    lines.append(tokens + (f" in {story.choices} choices" if story.choices > 1 else ""))
    return lines


def _end(story: Story) -> str:
    if story.ended_s is None:
        return "still open"
    if story.fault:
        return f"ended as {story.fault}: {story.message}"
    return f"answered ({', '.join(story.finish) or 'nothing'})"


def _told(event: StoryEvent, story: Story) -> str:
    worker = event.worker + (f"~{event.rank}" if event.rank is not None else "")
    again = f", attempt {event.attempt}" if event.attempt > 1 else ""
    match event.kind:
        case "placed":
            if not event.by:
                return f"placed on {worker}{again} by the worker itself"
            cached = max(0, (event.tokens or story.prompt_tokens) - event.uncached)
            apart = f"; prompt computed by {'any prefill worker' if event.prefill == '*' else event.prefill}"
            return f"placed on {worker}{again} by {event.by}, {cached} prompt tokens cached by prediction" + (
                apart if event.prefill else ""
            )
        case "started":
            return f"started on {worker}{again}"
        case "prefilled":
            fetched = f", blocks fetched in {event.fetch_ms} ms" if event.fetch_ms else ""
            return f"first token on {worker}{again}, {event.uncached} prompt tokens computed{fetched}"
        case "moved":
            return f"moved on from {worker or 'its worker'}: attempt {event.attempt} is next"
        case "settled":
            return f"settled by {worker}{again}, {event.tokens} tokens made there"


def _line(after_s: float, text: str) -> str:
    return f"  +{after_s:8.3f}  {text}"


def _sums(parts: Sequence[Stage]) -> str:
    sums: dict[StageName, float] = {}
    for part in parts:
        sums[part.name] = sums.get(part.name, 0.0) + part.seconds
    return ", ".join(f"{MARKS[name]} {name} {seconds:.3f} s" for name, seconds in sums.items())
