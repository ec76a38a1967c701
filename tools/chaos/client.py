"""The ledger's client: asks questions whose answer it knows, and enters how each one ended."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.tools.chaos.answer_checker import AnswerChecker
from headrace.tools.chaos.api_questions import ApiQuestion
from headrace.tools.chaos.http import Cut, Response, post
from headrace.tools.chaos.ledger import Ended, Entry, Ledger, Outcome, divergence
from headrace.tools.chaos.questions import DEADLINE_S, Question

_GIVE_UP_S = DEADLINE_S + 20.0
_AFTER_REFUSAL_S = 0.3
_AVOID_S = 2.0  # a frontend that nobody reached gets nothing for so long, if there is another one
_LEAVING = ("draining", "cancelled")  # codes of a frontend that goes away under an answer
_CODE_POISON = "poison"
_CRASHED = "crashed"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a frontend listens."""

    name: str
    host: str
    port: int


class LedgerClient:
    """`run` keeps `clients` requests open until `stop`; each in turn at the next frontend."""

    def __init__(
        self,
        ledger: Ledger,
        questions: Iterator[Question | ApiQuestion],
        frontends: Sequence[Address],
        *,
        model: str,
        clock: Callable[[], float],
    ) -> None:
        self._ledger = ledger
        self._questions = questions
        self._frontends = frontends
        self._model = model
        self._clock = clock
        self._stopping = asyncio.Event()
        self._avoid_until_s: dict[str, float] = {}

    def stop(self) -> None:
        """Ask nothing more; what is open goes on."""
        self._stopping.set()

    async def run(self, clients: int) -> None:
        """Returns once `stop` was called and every request has ended."""
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(self._ask_on())

    async def _ask_on(self) -> None:
        while not self._stopping.is_set():
            entry = await self.ask(next(self._questions))
            if entry.outcome in (Outcome.REFUSED, Outcome.UNREACHED, Outcome.CUT):
                await asyncio.sleep(_AFTER_REFUSAL_S)

    async def ask(self, question: Question | ApiQuestion) -> Entry:
        """Send one and see it to its end."""
        frontend = self._choose(question.number)
        entry = self._ledger.begin(Entry(question.number, frontend.name, self._clock(), stream=question.stream))
        try:
            async with asyncio.timeout(_GIVE_UP_S):
                ended = await self._exchange(question, frontend, entry)
        except Cut as error:
            ended = Ended(Outcome.CUT, str(error))
        except TimeoutError:
            ended = Ended(Outcome.LOST, f"no end within {_GIVE_UP_S:g} s, its deadline was {DEADLINE_S:g} s")
        except OSError as error:
            self._avoid_until_s[frontend.name] = self._clock() + _AVOID_S
            ended = Ended(Outcome.UNREACHED, str(error))
        entry.end(ended.outcome, self._clock(), ended.detail)
        return entry

    def _choose(self, number: int) -> Address:
        """In turn, as a load balancer does that notices who is down."""
        now = self._clock()
        up = [frontend for frontend in self._frontends if self._avoid_until_s.get(frontend.name, 0.0) <= now]
        among = up or self._frontends
        return among[number % len(among)]

    async def _exchange(self, question: Question | ApiQuestion, frontend: Address, entry: Entry) -> Ended:
        headers = {"x-request-timeout-s": f"{DEADLINE_S:g}"}
        async with post(frontend.host, frontend.port, question.path, question.body(self._model), headers=headers) as response:
            entry.id = response.headers.get("x-request-id", "")
            if response.status != 200:
                return refusal(response.status, response.headers, await response.body())
            if question.stream:
                return await self._read_stream(question, response, entry)
            answer = json.loads(await response.body())
            return (
                AnswerChecker(question).whole(answer) if isinstance(question, ApiQuestion) else check_answer(question, answer)
            )

    async def _read_stream(self, question: Question | ApiQuestion, response: Response, entry: Entry) -> Ended:
        reading = AnswerChecker(question) if isinstance(question, ApiQuestion) else Reading(question)
        async for data in response.events():
            if data == b"[DONE]":
                return reading.ended()
            event = json.loads(data)
            if not entry.id:
                entry.id = str(event.get("id", "")).removeprefix("cmpl-")
            if (broken := reading.take(event)) is not None:
                return broken
            if event.get("choices") or str(event.get("type")).endswith("delta"):
                entry.came.append(self._clock())
            if question.cancel_after is not None and len(entry.came) > question.cancel_after:
                return reading.so_far() or Ended(Outcome.CANCELLED)
            if reading.over:
                return reading.ended()
        return Ended(Outcome.LOST, "the stream ended without [DONE]")


class Reading:
    """A stream that is compared with what must come, piece by piece."""

    over = False  # it ends with [DONE]

    def __init__(self, question: Question) -> None:
        self._question = question
        self._texts = [""] * question.choices
        self._finishes: list[str | None] = [None] * question.choices
        self._usage: dict[str, Any] | None = None

    def take(self, event: dict[str, Any]) -> Ended | None:
        """One event; the end if it is one, or shows that something is wrong."""
        if "error" in event:
            return broken_off(event["error"])
        self._usage = event.get("usage") or self._usage
        for choice in event["choices"]:
            index = choice["index"]
            if self._finishes[index] is not None and choice["text"]:
                return Ended(Outcome.DUPLICATED, f"choice {index} went on after its end: {choice['text']!r}")
            self._texts[index] += choice["text"]
            self._finishes[index] = choice["finish_reason"] or self._finishes[index]
            wrong = divergence(self._texts[index], self._question.texts[index])
            if wrong is not None and wrong.sure:
                return Ended(wrong.outcome, f"choice {index} {wrong.detail}")
        return None

    def so_far(self) -> Ended | None:
        """What is wrong with that which has come."""
        for index, (text, expected) in enumerate(zip(self._texts, self._question.texts, strict=True)):
            if (wrong := divergence(text, expected)) is not None:
                return Ended(wrong.outcome, f"choice {index} {wrong.detail}")
        return None

    def ended(self) -> Ended:
        """After the last event."""
        choices = [
            {"index": i, "text": text, "finish_reason": finish}
            for i, (text, finish) in enumerate(zip(self._texts, self._finishes, strict=True))
        ]
        return check_answer(self._question, {"choices": choices, "usage": self._usage})


def check_answer(question: Question, answer: dict[str, Any]) -> Ended:
    """A whole answer: texts, ends and counts."""
    choices = {choice["index"]: choice for choice in answer["choices"]}
    if sorted(choices) != list(range(question.choices)):
        return Ended(Outcome.WRONG, f"choices {sorted(choices)} instead of {question.choices}")
    for index, expected in enumerate(question.texts):
        text, finish = choices[index]["text"], choices[index]["finish_reason"]
        if (wrong := divergence(text, expected)) is not None:
            return Ended(wrong.outcome, f"choice {index} {wrong.detail}")
        if text != expected:
            return Ended(Outcome.MISSING, f"choice {index} ended ({finish}) after {len(text)} of {len(expected)} characters")
        if finish != question.finishes[index]:
            return Ended(Outcome.WRONG, f"choice {index} ended with {finish!r} instead of {question.finishes[index]!r}")
    usage = answer.get("usage") or {}
    counted = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
    wanted = (len(question.prompt), question.completion_tokens)
    if counted[0] != wanted[0] or (wanted[1] is not None and counted[1] != wanted[1]):
        return Ended(Outcome.WRONG, f"usage says {counted} prompt and answer tokens instead of {wanted}")
    return Ended(Outcome.ANSWERED)


def refusal(status: int, headers: dict[str, str], body: bytes) -> Ended:
    """An answer that is an error from the start."""
    try:
        error = json.loads(body)["error"]
        code, typed = error.get("code"), bool(error["type"] and error["message"])  # Anthropic's errors have no code
    except (ValueError, KeyError, TypeError):
        return Ended(Outcome.FAILED, f"status {status} without a typed error: {body[:200]!r}")
    told = f"status {status}, {code}: {error['message']}"
    if code == _CODE_POISON or (code is None and _CRASHED in error["message"]):
        return Ended(Outcome.POISONED, told)
    if status in (429, 503, 529) and typed and headers.get("x-should-retry") != "false":
        return Ended(Outcome.REFUSED, told)
    return Ended(Outcome.FAILED, told)


def broken_off(error: dict[str, Any]) -> Ended:
    """An error that came after the first tokens."""
    code = error.get("code")
    told = f"after the first tokens, {code}: {error.get('message')}"
    if code == _CODE_POISON:
        return Ended(Outcome.POISONED, told)
    return Ended(Outcome.CUT if code in _LEAVING else Outcome.FAILED, told)
