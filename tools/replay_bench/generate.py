"""Generated traces, for tuning and tests on other load than a published trace.

`conversations`: all requests share their first block (one system prompt) and many multi-turn conversations interleave, every
turn bringing back the whole history. Affinity that follows the longest match sends all newcomers to one worker here."""

from __future__ import annotations

import random
from collections.abc import Callable

from headrace.router.errors import TraceInvalid
from headrace.tools.replay_bench.trace import BLOCK_TOKENS, Trace, TraceRequest, chain_value


def conversations(
    *,
    requests: int = 4000,
    rate: float = 4.0,
    seed: int = 0,
    system_tokens: int = 700,
    users: int = 24,
    turns: float = 6.0,
    think_s: float = 30.0,
) -> Trace:
    """Generate conversations that begin as a Poisson process.

    They have `turns` turns on average (geometric) and think times of `think_s` on average (exponential) between them.

    The system prompt fills one block and reaches into the next. A conversation belongs to one of `users` documents of very
    different popularity, which follow the system prompt; a few of the documents are very long. Half of the conversations are
    about no document.
    """
    rng = random.Random(f"conversations {seed}")  # noqa: S311 - reproducible, not secret
    documents = [_document(rng, length=int(min(120_000, rng.lognormvariate(9.0, 1.0)))) for _ in range(users)]
    popularity = [1 / (n + 1) for n in range(users)]
    pending: list[tuple[float, int, int, tuple[int, ...]]] = []
    at_s = 0.0
    while len(pending) < requests * 1.2 + 50:  # more than are needed: later turns of the last ones fall off the end
        at_s += rng.expovariate(rate / turns)
        document = rng.choices(documents, popularity)[0] if rng.random() < 0.5 else []
        pending += _conversation(rng, at_s, document, system_tokens=system_tokens, turns=turns, think_s=think_s)
    pending.sort()
    start_s = pending[0][0]
    return Trace(
        f"conversations (seed {seed})",
        tuple(
            TraceRequest(at_s=at_s - start_s, tokens=tokens, output=output, chain=chain)
            for at_s, tokens, output, chain in pending[:requests]
        ),
    )


def one_shot(*, requests: int = 4000, rate: float = 4.0, seed: int = 0, tokens: int = 12_000) -> Trace:
    """Generate requests that share nothing and do not come back, with prompt lengths spread widely around `tokens`.

    No policy can save work here: policies differ in balance and in the wait of long prompts.
    """
    rng = random.Random(f"one-shot {seed}")  # noqa: S311  # a load, not a secret
    made = []
    at_s = 0.0
    for _ in range(requests):
        length = int(min(150_000, max(64, rng.lognormvariate(0.0, 1.2) * tokens / 2)))
        made.append(TraceRequest(at_s=at_s, tokens=length, output=_answer(rng), chain=_blocks(rng, length)))
        at_s += rng.expovariate(rate)
    return Trace(f"one-shot (seed {seed})", tuple(made))


GENERATORS: dict[str, Callable[..., Trace]] = {"conversations": conversations, "one-shot": one_shot}


def generate(kind: str, *, requests: int, seed: int) -> Trace:
    """Generate a trace of this kind. Raises TraceInvalid for a kind that is not in GENERATORS."""
    if kind not in GENERATORS:
        raise TraceInvalid(f"trace kind {kind!r}: there are {', '.join(GENERATORS)}")
    return GENERATORS[kind](requests=requests, seed=seed)


def _conversation(
    rng: random.Random, at_s: float, document: list[int], *, system_tokens: int, turns: float, think_s: float
) -> list[tuple[float, int, int, tuple[int, ...]]]:
    # All conversations share whole blocks of the system prompt; the block it ends in is the document's, or the conversation's.
    shared = [chain_value(n) for n in range(system_tokens // BLOCK_TOKENS)]
    tokens = system_tokens + len(document) * BLOCK_TOKENS
    blocks = shared + document
    made = []
    while True:
        tokens += int(min(16_000, rng.lognormvariate(6.3, 1.1))) + 8  # what the user says
        count = -(-tokens // BLOCK_TOKENS)
        # The last block is not full, so its id is this turn's alone; the next turn has another one there.
        blocks += [_own(rng) for _ in range(count - 1 - len(blocks))]
        made.append((at_s, tokens, output := _answer(rng), (*blocks[: count - 1], _own(rng))))
        if rng.random() < 1 / turns:
            return made
        at_s += rng.expovariate(1 / think_s) + output * 0.02
        tokens += output


def _document(rng: random.Random, *, length: int) -> list[int]:
    return list(_blocks(rng, length))


def _blocks(rng: random.Random, tokens: int) -> tuple[int, ...]:
    return tuple(_own(rng) for _ in range(-(-tokens // BLOCK_TOKENS)))


def _own(rng: random.Random) -> int:
    return rng.getrandbits(64)


def _answer(rng: random.Random) -> int:
    return int(min(2000, rng.lognormvariate(5.0, 0.9))) + 1
