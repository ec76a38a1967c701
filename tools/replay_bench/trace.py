"""Traces of requests in the format of the Mooncake release.

A line is a JSON object with `timestamp` (milliseconds from the start), `input_length`, `output_length` (tokens) and `hash_ids`,
an id for each 512-token block of the prompt, the last of them perhaps not full. Equal ids mean equal prompts up to the end of
that block.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from headrace.router.errors import TraceInvalid
from headrace.router.replay import PrefixCache

BLOCK_TOKENS = 512
MOST_BLOCKS = 1 << 16  # of one prompt: 33 M tokens; more is a damaged file
SAMPLE = Path(__file__).parent / "assets" / "mooncake" / "synthetic_tail.jsonl"

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    at_s: float
    tokens: int
    output: int
    chain: tuple[int, ...]
    request_class: str = "std"
    tenant: str = "_"
    ttft_target_s: float | None = None  # by which a fleet is chosen


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    requests: tuple[TraceRequest, ...]

    @property
    def duration_s(self) -> float:
        return self.requests[-1].at_s - self.requests[0].at_s if self.requests else 0.0

    @property
    def rate(self) -> float:
        """Requests per second; of a trace without duration 1."""
        return (len(self.requests) - 1) / self.duration_s if self.duration_s > 0 else 1.0

    @property
    def blocks(self) -> int:
        return sum(len(r.chain) for r in self.requests)


def read_trace(path: Path | str, *, limit: int | None = None) -> Trace:
    """Read the whole file or its first `limit` requests. Raises TraceInvalid with file, line, field and value."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            return parse_trace(file, name=str(path), limit=limit)
    except OSError as error:
        raise TraceInvalid(f"{path}: {error.strerror or error}") from error


def parse_trace(lines: Iterable[bytes], *, name: str, limit: int | None = None) -> Trace:
    """Read a trace from lines; blank ones are skipped. Raises TraceInvalid."""
    decoder = msgspec.json.Decoder()
    requests: list[TraceRequest] = []
    for number, line in enumerate(lines, 1):
        if limit is not None and len(requests) >= limit:
            break
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        try:
            record = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TraceInvalid(f"{where}: no JSON object ({error}): {line[:60]!r}") from None
        request = _request(record, where=where)
        if requests and request.at_s < requests[-1].at_s:
            raise TraceInvalid(f"{where}: timestamp {record['timestamp']!r} is before that of the request above it")
        requests.append(request)
    if not requests:
        raise TraceInvalid(f"{name}: no requests in it")
    start_s = requests[0].at_s
    return Trace(name, tuple(replace(r, at_s=r.at_s - start_s) for r in requests) if start_s else tuple(requests))


def chain_value(hash_id: int) -> int:
    """Map a block id to a chain value, one to one, spread over all 64 bits as real ones are (finaliser of SplitMix64)."""
    x = (hash_id + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def accelerate(trace: Trace, factor: float) -> Trace:
    """Let the requests arrive `factor` times as fast. Raises TraceInvalid for a factor that is not above 0."""
    if not 0 < factor < float("inf"):
        raise TraceInvalid(f"rate factor {factor!r}: must be a number above 0")
    return Trace(trace.name, tuple(replace(r, at_s=r.at_s / factor) for r in trace.requests))


def assign(
    trace: Trace,
    *,
    classes: Mapping[str, float] | None = None,
    tenants: int = 0,
    skew: float = 1.0,
    seed: int = 0,
) -> Trace:
    """Give every request a class (drawn by the shares in `classes`) and a tenant.

    Tenants are named t0, t1, …; t0 sends most: the load of the n-th goes as 1 / (n + 1) ** skew, 0 being even. Requests with
    the same first two blocks are taken for one conversation and have the same tenant; all may share the first block alone.
    """
    rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
    names = list(classes or {})
    weights = list((classes or {}).values())
    load = [1 / (n + 1) ** skew for n in range(tenants)]
    of_conversation: dict[int, int] = {}
    requests = []
    for r in trace.requests:
        changes: dict[str, Any] = {}
        if names:
            changes["request_class"] = rng.choices(names, weights)[0]
        if tenants:
            key = r.chain[min(1, len(r.chain) - 1)]
            tenant = of_conversation.get(key)
            if tenant is None:
                tenant = of_conversation[key] = rng.choices(range(tenants), load)[0]
            changes["tenant"] = f"t{tenant}"
        requests.append(replace(r, **changes))
    return Trace(trace.name, tuple(requests))


def _request(record: object, *, where: str) -> TraceRequest:
    if not isinstance(record, dict):
        raise TraceInvalid(f"{where}: a {type(record).__name__} instead of an object: {str(record)[:60]}")
    at_ms = record.get("timestamp")
    if isinstance(at_ms, bool) or not isinstance(at_ms, int | float) or not 0 <= at_ms < float("inf"):
        raise TraceInvalid(f"{where}: timestamp {at_ms!r} is no number of milliseconds from 0 on")
    tokens = _count(record, "input_length", where=where)
    output = _count(record, "output_length", where=where)
    ids = record.get("hash_ids")
    if not isinstance(ids, list) or not ids:
        raise TraceInvalid(f"{where}: hash_ids {str(ids)[:60]} is no list with a block id")
    expected = -(-tokens // BLOCK_TOKENS)
    if len(ids) != expected:
        raise TraceInvalid(
            f"{where}: {len(ids)} hash_ids for input_length {tokens}, which is {expected} blocks of {BLOCK_TOKENS} tokens"
        )
    if len(ids) > MOST_BLOCKS:
        raise TraceInvalid(f"{where}: {len(ids)} blocks; at most {MOST_BLOCKS} are taken")
    for position, item in enumerate(ids):
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= _MASK:
            raise TraceInvalid(f"{where}: hash_ids[{position}] is {item!r}, no block id from 0 to 2**64 - 1")
    return TraceRequest(at_s=at_ms / 1000, tokens=tokens, output=output, chain=tuple(map(chain_value, ids)))


def _count(record: Mapping[str, object], field: str, *, where: str) -> int:
    value = record.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise TraceInvalid(f"{where}: {field} {value!r} is no number of tokens from 1 on")
    return value


# The ceiling of the hit rate: the same requests in the same order on a single cache, without any placement.


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """Blocks that hit, as parts of all blocks, in an infinite cache and in a pooled one.

    `pooled` is an LRU cache as large as those of all workers together. It is no strict bound: a placement that keeps the right
    blocks can beat it.
    """

    infinite: float
    pooled: float
    pooled_blocks: int


def ceiling(trace: Trace, *, pooled_blocks: int) -> Ceiling:
    return Ceiling(infinite=_infinite_rate(trace), pooled=lru_rate(trace, blocks=pooled_blocks), pooled_blocks=pooled_blocks)


def lru_rate(trace: Trace, *, blocks: int) -> float:
    """Compute the hit rate in blocks of an LRU cache that sees the requests one after the other."""
    cache = PrefixCache(blocks)
    hits = 0
    for request in trace.requests:
        hits += cache.match(request.chain)
        cache.touch(request.chain)
    return hits / trace.blocks


def _infinite_rate(trace: Trace) -> float:
    seen: set[int] = set()
    hits = 0
    for request in trace.requests:
        for block in request.chain:
            if block not in seen:
                break
            hits += 1
        seen.update(request.chain)
    return hits / trace.blocks


# Generated traces, for tuning and tests on other load than a published trace.
#
# `conversations`: all requests share their first block (one system prompt) and many multi-turn conversations interleave,
# every turn bringing back the whole history. Affinity that follows the longest match sends all newcomers to one worker here.


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
