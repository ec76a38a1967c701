"""The ledger of a chaos run: how each request ended, checked against its expected answer and the promises."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any

from headrace.tools.chaos.questions import TOOL, ApiQuestion


class Outcome(StrEnum):
    OPEN = "open"
    ANSWERED = "answered"  # once, and exactly right
    CANCELLED = "cancelled"  # by its client, on purpose; the answer was right so far
    REFUSED = "refused"  # with a typed error that says to try again, before anything was sent
    UNREACHED = "unreached"  # the frontend was down
    CUT = "cut"  # its frontend died or shut down during the answer
    POISONED = "poisoned"  # its workers crashed, alone with it at last
    LOST = "lost"  # no end, or an end without a reason
    FAILED = "failed"  # any other error
    WRONG = "wrong"  # text, counts or finish reason are not those of the undisturbed run
    DUPLICATED = "duplicated"  # tokens came twice
    MISSING = "missing"  # tokens were left out


FINE = (Outcome.ANSWERED, Outcome.CANCELLED, Outcome.REFUSED)
# These are allowed only while the request's frontend was down.
FRONTENDS_OWN = (Outcome.UNREACHED, Outcome.CUT)
BROKEN = (Outcome.OPEN, Outcome.LOST, Outcome.FAILED, Outcome.WRONG, Outcome.DUPLICATED, Outcome.MISSING)
POISON_CRASHES = 3
AT_ONCE_S = 0.25
PIECE = 24  # characters


@dataclass(frozen=True, slots=True)
class Ended:
    outcome: Outcome
    detail: str = ""


@dataclass(slots=True)
class LedgerEntry:
    """A request that was sent. Times are seconds of one monotonic clock; `came` are the arrival times of stream pieces."""

    number: int
    frontend: str
    began_s: float
    stream: bool = False
    id: str = ""
    ended_s: float = 0.0
    outcome: Outcome = Outcome.OPEN
    detail: str = ""
    came: list[float] = field(default_factory=list)

    def end(self, outcome: Outcome, now_s: float, detail: str = "") -> None:
        self.outcome, self.ended_s, self.detail = outcome, now_s, detail

    def open_between(self, first_s: float, last_s: float) -> bool:
        return self.began_s <= last_s and (self.outcome is Outcome.OPEN or self.ended_s >= first_s)


@dataclass(slots=True)
class Injury:
    """An injected fault.

    `over_s`: the time when its victim ran again, or is meant to. `held`: the requests that the victim had in hand; None if the
    fault concerns all requests. `crash`: a worker died with runs on it.
    """

    kind: str
    victim: str
    at_s: float
    over_s: float = float("inf")
    held: frozenset[str] | None = None
    crash: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause of a stream from `from_s` on, under a fault of this kind made to `victim` at `fault_s`."""

    kind: str
    victim: str
    fault_s: float
    request: str
    from_s: float
    length_s: float


@dataclass(frozen=True, slots=True)
class Divergence:
    """A difference from the expected answer. `sure`: there is enough text to tell duplicated, missing and wrong text apart."""

    outcome: Outcome
    detail: str
    sure: bool


def divergence(got: str, expected: str) -> Divergence | None:
    """Find the first difference in `got`, the beginning of an answer. Returns None if there is none so far."""
    if expected.startswith(got):
        return None
    at = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), min(len(got), len(expected)))
    piece = got[at : at + PIECE]
    detail = f"at character {at}: got {piece!r}, expected {expected[at : at + PIECE]!r}"
    # Words are drawn from thousands, so that a piece of this length occurs in one place only.
    if piece in expected[: at + len(piece) - 1]:
        outcome = Outcome.DUPLICATED
    else:
        outcome = Outcome.MISSING if piece in expected[at:] else Outcome.WRONG
    return Divergence(outcome, detail, sure=len(piece) == PIECE)


class Ledger:
    """The requests of a chaos run and the faults that were injected meanwhile."""

    def __init__(self) -> None:
        self.entries: list[LedgerEntry] = []
        self.injuries: list[Injury] = []

    def __iter__(self) -> Iterator[LedgerEntry]:
        return iter(self.entries)

    def begin(self, entry: LedgerEntry) -> LedgerEntry:
        self.entries.append(entry)
        return entry

    def injure(self, injury: Injury) -> Injury:
        self.injuries.append(injury)
        return injury

    def counts(self) -> Counter[Outcome]:
        return Counter(entry.outcome for entry in self.entries)

    def broken(self) -> list[LedgerEntry]:
        return [entry for entry in self.entries if not self._allowed(entry)]

    def _allowed(self, entry: LedgerEntry) -> bool:
        if entry.outcome in FINE:
            return True
        if entry.outcome in FRONTENDS_OWN:
            return any(
                injury.victim == entry.frontend and entry.open_between(injury.at_s, injury.over_s) for injury in self.injuries
            )
        if entry.outcome is Outcome.POISONED:
            crashes = sum(injury.crash and entry.open_between(injury.at_s, injury.at_s) for injury in self.injuries)
            return crashes >= POISON_CRASHES
        return False

    def pauses(self) -> dict[str, list[float]]:
        """Return, by kind of fault, the longest pause between two pieces of each stream it touched, in seconds.

        Requests that an earlier crash had hit already count apart, under the kind with " again" appended: after the second
        crash they may be suspect, and wait for their turn on a trial worker.
        """
        found: dict[str, list[float]] = {}
        for pause in self.each_pause():
            found.setdefault(pause.kind, []).append(pause.length_s)
        return found

    def each_pause(self) -> list[Pause]:
        """Return the longest pause of each stream under each fault.

        A pause belongs to the last fault that was made before the piece ahead of the pause arrived, or right after that.
        """
        found: list[Pause] = []
        crashed: set[str] = set()
        ends = [injury.at_s - AT_ONCE_S for injury in self.injuries[1:]]
        for injury, until_s in zip(self.injuries, [*ends, float("inf")], strict=False):
            for entry in self.entries:
                if injury.held is not None and entry.id not in injury.held:
                    continue
                came = entry.came
                gaps = [(b - a, a) for a, b in pairwise(came) if injury.at_s - AT_ONCE_S <= a < until_s]
                if came and came[0] < injury.at_s < came[-1] and gaps:
                    again = " again" if injury.crash and entry.id in crashed else ""
                    length_s, from_s = max(gaps)
                    found.append(Pause(injury.kind + again, injury.victim, injury.at_s, entry.id, from_s, length_s))
            if injury.crash:
                crashed |= injury.held or frozenset()
        return found


def percentile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed, or 0 without values."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    rank = -(-share * len(ordered) // 1)  # rounded up
    return ordered[max(0, min(len(ordered), int(rank)) - 1)]


_CRASHED = "crashed"  # The poison error's message has this word. These APIs have no field for our error code.


class AnswerChecker:
    """Collects one answer and compares it: call `feed` for each event of a stream, or `check_whole` for a body."""

    def __init__(self, question: ApiQuestion) -> None:
        self._question = question
        self._parts: dict[str, str] = {"content": "", "reasoning": "", "logprobs": ""}
        self._calls: dict[Any, list[str]] = {}  # index in the stream → name, arguments
        self._finish: str | None = None
        self.complete = False  # The last event of the API has come.

    # -- streams -----------------------------------------------------------------------------------------------------

    def feed(self, event: dict[str, Any]) -> Ended | None:
        """Add one event. Returns the end if the event is an error or shows that the answer is wrong, else None."""
        if "choices" in event:
            for choice in event["choices"]:
                self._choice(choice.get("delta", choice), choice)
        elif (failed := self._typed_event(event)) is not None:
            return failed
        return self._find_divergence(sure=True)

    def _choice(self, delta: dict[str, Any], choice: dict[str, Any]) -> None:
        self._add("content", delta.get("content") or choice.get("text"))
        self._add("reasoning", delta.get("reasoning_content") or delta.get("reasoning"))
        for call in delta.get("tool_calls") or ():
            self._call(call.get("index", len(self._calls)), **call["function"])
        for entry in (choice.get("logprobs") or {}).get("content") or ():
            self._add("logprobs", entry["token"])
        self._finish = choice.get("finish_reason") or self._finish

    def _typed_event(self, event: dict[str, Any]) -> Ended | None:
        kind = event.get("type")
        if kind in ("error", "response.failed") or "error" in event:
            error = event.get("error") or (event.get("response") or {}).get("error") or event
            return faulted(error)
        match kind:
            case "response.output_text.delta":
                self._add("content", event["delta"])
            case "response.output_item.added" if event["item"]["type"] == "function_call":
                self._call(event["output_index"], name=event["item"]["name"])
            case "response.function_call_arguments.delta":
                self._call(event["output_index"], arguments=event["delta"])
            case "response.completed" | "response.incomplete":
                self._finish, self.complete = event["response"]["status"], True
            case "content_block_start" if event["content_block"]["type"] == "tool_use":
                self._call(event["index"], name=event["content_block"]["name"])
            case "content_block_delta":
                delta = event["delta"]
                self._add("content", delta.get("text"))
                if "partial_json" in delta:
                    self._call(event["index"], arguments=delta["partial_json"])
            case "message_delta":
                self._finish = event["delta"]["stop_reason"]
            case "message_stop":
                self.complete = True
        return None

    def _add(self, part: str, text: str | None) -> None:
        self._parts[part] += text or ""

    def _call(self, index: Any, *, name: str | None = None, arguments: str | None = None, **_more: Any) -> None:
        call = self._calls.setdefault(index, ["", ""])
        call[0] += name or ""
        call[1] += arguments or ""

    # -- whole answers -----------------------------------------------------------------------------------------------

    def check_whole(self, answer: dict[str, Any]) -> Ended:
        if "choices" in answer:
            for choice in answer["choices"]:
                self._choice(choice.get("message", choice), choice)
        else:
            for index, item in enumerate(answer.get("output") or answer.get("content") or ()):
                self._item(index, item)
            self._finish = answer.get("stop_reason") or answer.get("status")
        return self.ended()

    def _item(self, index: int, item: dict[str, Any]) -> None:
        match item["type"]:
            case "message":
                for part in item["content"]:
                    self._add("content", part.get("text"))
            case "text":
                self._add("content", item["text"])
            case "function_call":
                self._call(index, name=item["name"], arguments=item["arguments"])
            case "tool_use":
                self._call(index, name=item["name"], arguments=json.dumps(item["input"]))

    # -- verdicts ----------------------------------------------------------------------------------------------------

    def _expected(self) -> dict[str, str]:
        question = self._question
        return {
            "content": question.content,
            "reasoning": question.reasoning,
            "logprobs": question.content if question.logprobs else "",
        }

    def _find_divergence(self, *, sure: bool) -> Ended | None:
        expected = self._expected()
        for part, text in self._parts.items():
            if part == "logprobs":
                continue  # The end token has a log-probability too, after the text.
            wrong = divergence(text, expected[part])
            if wrong is not None and (wrong.sure or not sure):
                return Ended(wrong.outcome, f"{part} {wrong.detail}")
        return None

    def check_so_far(self) -> Ended | None:
        """Compare the events so far with the beginning of the expected answer. Returns None if they agree."""
        return self._find_divergence(sure=False)

    def ended(self) -> Ended:
        if (wrong := self._find_divergence(sure=False)) is not None:
            return wrong
        for part, text in self._expected().items():
            got = self._parts[part]
            if part == "logprobs":
                if not got.startswith(text):
                    return Ended(Outcome.WRONG, f"log-probabilities of {got!r} instead of {text!r}")
            elif got != text:
                return Ended(Outcome.MISSING, f"{part} ended ({self._finish}) after {len(got)} of {len(text)} characters")
        if (wrong := self._wrong_calls()) is not None:
            return wrong
        if self._finish != self._question.finish:
            return Ended(Outcome.WRONG, f"ended with {self._finish!r} instead of {self._question.finish!r}")
        return Ended(Outcome.ANSWERED)

    def _wrong_calls(self) -> Ended | None:
        wanted = [(TOOL, {"names": list(names)}) for names in self._question.calls]
        calls = list(self._calls.values())
        try:
            got = [(name, json.loads(arguments)) for name, arguments in calls]
        except ValueError:
            return Ended(Outcome.WRONG, f"arguments of a tool call that are no JSON: {calls!r}"[:400])
        return None if got == wanted else Ended(Outcome.WRONG, f"tool calls {got!r} instead of {wanted!r}"[:400])


def faulted(error: dict[str, Any]) -> Ended:
    """Classify an error event after the first event. The ledger allows `CUT` only while that frontend was down."""
    detail = f"after the first tokens, {error.get('code') or error.get('type')}: {error.get('message')}"
    if error.get("code") == "poison" or _CRASHED in str(error.get("message")):
        return Ended(Outcome.POISONED, detail)
    return Ended(Outcome.CUT, detail)
