"""What simulated clients ask for, and what they must get.

Every run has an alphabet of its own: a token names its run, its choice and its position.  A token from the wrong run, a missing
or a repeated one shows at once.  Text is a pure function of the token ids, held back now and then as a detokeniser does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.broker.jobs import Job
from headrace.broker.messages.frames import Row
from headrace.broker.messages.requests import Generation
from headrace.broker.models.cards import ModelCard
from headrace.jetstream.subjects import pool_id
from tests.simulation.virtual.machine import Machine
from tests.simulation.virtual.world import Violation

if TYPE_CHECKING:
    from headrace.broker.ingress.stream import JobStream

POOL = pool_id("m")
CARD = ModelCard(model="m", pool=POOL, context_length=4096, block_size=32)
HOLD = 3  # the text of every third token is held back until the next


@dataclass(frozen=True, slots=True)
class RunNote:
    """One execution that really began: what its engine was given to go on from."""

    tag: int
    request_id: str
    attempt: int
    run: int
    machine: Machine
    prefix: tuple[tuple[int, ...], ...]


def token(tag: int, choice: int, position: int) -> int:
    """Return the token of a run in 32 bits, as ids of tokens have: up to 4,096 runs of 16 choices with 65,536 tokens each."""
    assert tag < 1 << 12, tag
    assert choice < 1 << 4, choice
    assert position < 1 << 16, position
    return tag << 20 | choice << 16 | position


def tag_of(token_id: int) -> int:
    return token_id >> 20


def text_of(token_id: int) -> str:
    return f"<{token_id:x}>"


class Pipeline:
    """Text of one choice; fed with everything from the first token on."""

    def __init__(self) -> None:
        self._held = ""
        self._n = 0

    def push(self, token_id: int) -> str:
        self._n += 1
        text = self._held + text_of(token_id)
        self._held = ""
        if self._n % HOLD == 0:
            self._held, text = text, ""
        return text

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A kind of request. `poison` crashes the "worker" process, or its "engine"."""

    at_s: float = 0.0
    lengths: tuple[int, ...] = (8,)  # tokens per choice
    poison: str = ""
    deadline_s: float = 400.0
    payload: bytes = b"\1\0\0\0"
    pause_s: float = 0.0  # the reader waits so long between two looks
    cancel_s: float | None = None  # the client gives up after this
    invalid: bool = False  # the engine rejects it
    starts_within_s: float = 0.0  # promised from its submission on; 0 = nothing is
    pauses_within_s: float = 0.0  # the most that may pass between two of its tokens; 0 = nothing is promised
    batch: bool = False


@dataclass(eq=False, slots=True)
class Request:
    """One submitted wish: what has come of it."""

    id: str
    wish: Wish
    judge: Machine
    runs: dict[int, RunNote]  # by tag, of all requests
    accepted_s: float = 0.0
    outcome: str = ""  # "", "refused", "answered", or the code of the JobError
    cancelled: bool = False
    tokens: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finished: set[int] = field(default_factory=set)
    stream: JobStream | None = None

    def __post_init__(self) -> None:
        self.tokens = [[] for _ in self.wish.lengths]
        self.texts = ["" for _ in self.wish.lengths]

    @property
    def open(self) -> bool:
        return self.stream is not None and not self.outcome

    def job(self) -> Job:
        wish = self.wish
        return Job(
            id=self.id,
            card=CARD,
            generation=Generation(token_ids=wish.payload),
            prompt_tokens=len(wish.payload) // 4,
            max_tokens=max(wish.lengths),
            choices=len(wish.lengths),
            deadline_s=wish.deadline_s,
            request_class="batch" if wish.batch else "std",
        )

    def take(self, row: Row) -> None:
        """One row as the client reads it. Raises Violation."""
        got = self.tokens[row.choice]
        if row.choice in self.finished:
            raise Violation(f"tokens after the end: {self.id} choice {row.choice}")
        if row.offset != len(got):
            raise Violation(f"wrong offset in {self.id}: {row.offset} after {len(got)} tokens")
        if len(row.ids) != len(row.texts):
            raise Violation(f"texts and ids differ in {self.id}: {row}")
        for token_id in row.ids:
            self._check(row, token_id)
            got.append(token_id)
        self.texts[row.choice] += "".join(row.texts)
        if row.fin is not None:
            self.texts[row.choice] += row.fin.tail
            self.finished.add(row.choice)

    def _check(self, row: Row, token_id: int) -> None:
        got, note = self.tokens[row.choice], self.runs[tag_of(token_id)]
        where = f"{self.id} choice {row.choice} position {len(got)}"
        if note.request_id != self.id or token_id != token(note.tag, row.choice, len(got)):
            raise Violation(f"wrong token at {where}: {token_id:x}")
        if note.run != row.run:
            raise Violation(f"forged run at {where}: token of run {note.run} in a row of {row.run}")
        if (not got or tag_of(got[-1]) != note.tag) and tuple(got) != note.prefix[row.choice]:
            raise Violation(f"wrong run at {where}: it was to go on after {len(note.prefix[row.choice])} tokens")

    def check_answer(self) -> None:
        """The stream has ended well. Raises Violation unless every choice is whole."""
        for choice, length in enumerate(self.wish.lengths):
            if len(self.tokens[choice]) != length or choice not in self.finished:
                raise Violation(f"wrong answer to {self.id}: {len(self.tokens[choice])} of {length} tokens")
            expected = "".join(text_of(i) for i in self.tokens[choice])
            if self.texts[choice] != expected:
                raise Violation(f"wrong text of {self.id}: {self.texts[choice]} instead of {expected}")
