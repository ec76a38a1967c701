"""Messages that no part of Headrace may trust: the known nine of an audit, rubbish, and mutations of valid messages."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgpack
import msgspec

from headrace.broker.codec import encode, pack_u32, pack_u64
from headrace.broker.messages.control import (
    Abort,
    Answers,
    CancelJob,
    Carrying,
    Check,
    Claim,
    Explain,
    HistoryEntry,
    Inspect,
    LoadAdapter,
    Ping,
    Refuse,
    RunRef,
    RunVerdict,
    Since,
    SinceItem,
    SuspicionQuery,
)
from headrace.broker.messages.durable import StreamEntry
from headrace.broker.messages.events import JobEvent, JobEvents, KvReset, KvStep, LoadReport, RankLoad
from headrace.broker.messages.frames import Finish, Frame, JobFault, Part, Row, TokenLogprob
from headrace.broker.messages.members import IngressMember, RouterMember, WorkerMember
from headrace.broker.messages.prefill import PrefillCheck, PrefillDone, PrefillDrop, PrefillJob, PrefillTaken, SetRole
from headrace.broker.messages.requests import Envelope, Generation, Record, Spill
from headrace.broker.models.cards import CardFile, MediaSlot, ModelCard

STRANGER = "i-nobody"  # a token that names no process

DEEP_MAP = b"\x81\xa1z" * 30_000 + b"\xc0"
DEEP_ARRAY = b"\x91" * 100_000 + b"\xc0"

RUBBISH: list[bytes] = [
    b"",
    b"\xc1",
    b"\xc0",
    b"\x00",
    b"rubbish",
    b"\xff" * 64,
    b"{}",
    b"\x80",
    b"\x90",
    b"\xdd\xff\xff\xff\xff",  # an array of 2^32 - 1 items that are not there
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\x81\xa1v\x02",  # a newer version
    b"\x81\xa1v\xcf" + b"\xff" * 8,
    b"\x81\xa2id\xa2\xff\xfe",  # a text that is not UTF-8
    b"\xd4\x05\x00",  # an extension type
    DEEP_MAP,
    DEEP_ARRAY,
]

NASTY: list[Any] = [
    None,
    True,
    -1,
    0,
    2**31,
    10**12,
    -(2**63),
    2**63 - 1,
    2**64 - 1,
    math.nan,
    math.inf,
    -math.inf,
    1e300,
    -1.0,
    "",
    "a b",
    "a.b",
    "*",
    ">",
    "a\r\nPUB x 0\r\n",
    "\x00",
    "é" * 100,
    "x" * 5000,
    b"",
    b"\xff" * 7,
    [],
    {},
    [None],
    {"x": [1]},
]


def envelope(pool: str, *, name: str = "poison", judge: str = STRANGER, **changed: Any) -> Envelope:
    """A valid request, of a judge that does not exist."""
    now = time.time()
    payload = encode(Generation(token_ids=pack_u32([1, 2, 3, 4])))
    options: dict[str, Any] = {
        "model": "sim",
        "deadline": now + 60,
        "created": now,
        "tokens": 4,
        "max_tokens": 4,
        "payload": payload,
        **changed,
    }
    return Envelope(id=name, pool=pool, judge=judge, **options)


def plain(record: Record) -> dict[str, Any]:
    """A message as plain values, every field of it, so that each can be changed."""
    value: dict[str, Any] = {}
    whole = msgpack.unpackb(encode(record), strict_map_key=False)
    for one in msgspec.structs.fields(type(record)):
        held = getattr(record, one.name)
        value[one.name] = msgpack.unpackb(msgspec.msgpack.encode(held), strict_map_key=False)
    return {**value, **whole}


def mutated(value: Any) -> Iterator[Any]:
    """Every value that differs from this one in a single place: something nasty stands there."""
    yield from NASTY
    if isinstance(value, dict):
        for key, old in value.items():
            for new in mutated(old):
                yield {**value, key: new}
            yield {other: held for other, held in value.items() if other != key}
    elif isinstance(value, list):
        for at, old in enumerate(value):
            for new in mutated(old):
                yield [*value[:at], new, *value[at + 1 :]]


def packed(value: Any) -> bytes:
    data: bytes = msgpack.packb(value)
    return data


def mutations(record: Record) -> Iterator[bytes]:
    """The message itself, and each of its mutations."""
    yield packed(plain(record))
    for value in mutated(plain(record)):
        yield packed(value)


# Valid messages, by what reads them. Nothing in them is true: the ids, runs and processes do not exist.


def requests(pool: str) -> list[Record]:
    return [
        envelope(
            pool,
            hashes=pack_u64([1, 2]),
            block_size=16,
            prefer={"a": 1.0},
            require=["a"],
            trace={"a": "b"},
            adapter="none",
            session="s",
        ),
        envelope(pool, payload=b"", spill=Spill("nothing", 3, "00")),
    ]


def frames() -> list[Record]:
    logprob = TokenLogprob(1, b"a", -1.0, [(1, b"a", -1.0)])
    fault = JobFault("engine_error", "no", retry_after_s=1.0)
    fin = Finish(reason="error", stop=1, tail="t", prompt_logprobs=[None, logprob], vector=b"\0\0\0\0", fault=fault)
    row = Row("nothing", 1, 1, 0, 0, [1, 2], ["a", [Part("tool", "b", 0, "c", "d")]], [logprob, logprob], fin)
    return [Frame(worker="w-none", rows=[row])]


def events() -> list[Record]:
    return [
        JobEvents(events=[JobEvent(kind, "nothing", 1, "w-none", 4, 2, 1, "r-none", pack_u64([7]), "w-none", 1)])
        for kind in ("placed", "started", "prefilled", "settled", "moved")
    ]


def loads(worker: str = "w-none") -> list[Record]:
    ranks = [RankLoad(running=1, waiting=1), RankLoad()]
    return [LoadReport(worker=worker, epoch=1, n=1, at=1.0, slots=4, running=1, waiting=1, step_s=0.1, ranks=ranks)]


def ingress_controls() -> list[Record]:
    history = [HistoryEntry(1, "w-none", 3)]
    return [
        Claim(id="nothing", attempt=2, run=1, worker="w-none", history=history, group=1),
        SuspicionQuery(id="nothing", history=history),
        Check(worker="w-none", runs=[RunRef("nothing", 1, 1)]),
        Refuse(id="nothing", attempt=1, fault=JobFault("shed", "no", retry_after_s=1.0)),
        CancelJob(name="nothing", tenant="_"),
        Carrying(job="nothing", nonce="0"),
    ]


def worker_controls() -> list[Record]:
    fault = JobFault("engine_error", "no")
    return [
        Answers(answers=[RunVerdict("nothing", 1, 1, "done")]),
        Abort(runs=[RunRef("nothing", 1, 1)]),
        Since(items=[SinceItem("nothing", [0])]),
        Ping(),
        Inspect(),
        LoadAdapter(name="none", source="/nowhere"),
        PrefillTaken(job="nothing", worker="w-none"),
        PrefillDone(job="nothing", worker="w-none", params={"a": 1}, fault=fault),
        PrefillCheck(job="nothing"),
        PrefillDrop(jobs=["nothing"]),
        SetRole(role="no such role", grace_s=1.0),
    ]


def router_controls() -> list[Record]:
    return [Explain(id="nothing"), Inspect()]


def prefills() -> list[Record]:
    now = time.time()
    payload = encode(Generation(token_ids=pack_u32([1, 2, 3])))
    return [
        PrefillJob(
            job="nothing",
            id="nothing",
            attempt=1,
            decode="w-none",
            deadline=now + 5,
            created=now,
            tokens=3,
            uncached=3,
            hashes=pack_u64([1]),
            block_size=16,
            emitted=pack_u32([5]),
            payload=payload,
        )
    ]


def cache_events(place: str = "w-none") -> list[Record]:
    blocks = {"device": pack_u64([1, 2])}
    return [
        KvStep(worker=place, epoch=1, n=0, stored=blocks, removed={"host": pack_u64([3])}),
        KvReset(worker=place, epoch=1, n=1, dump=1, part=0, last=True, blocks=blocks),
    ]


def entries() -> list[Record]:
    row = Row("", 1, 1, 0, 0, [1], ["a"])
    return [
        StreamEntry(nonce="n", n=1, kind="take", carrier="i-none"),
        StreamEntry(nonce="n", n=2, kind="rows", rows=[row], events=[b"{}"], first_event=0),
        StreamEntry(nonce="n", n=3, kind="end", status="failed", fault=JobFault("engine_error", "no")),
        StreamEntry(nonce="n", n=4, kind="crash", history=[HistoryEntry(1, "w-none", 1)]),
    ]


def worker_member(pool: str, worker: str = "w-none") -> WorkerMember:
    """A worker that takes nothing: it drains."""
    return WorkerMember(
        worker=worker,
        pool=pool,
        model="sim",
        draining=True,
        slots=4,
        block_size=16,
        blocks=10,
        ranks=2,
        labels=["a"],
        adapters=["none"],
        started=1.0,
        epoch=1,
        host="h",
        pid=1,
        transfer_card=b"x",
    )


def ingress_member() -> IngressMember:
    return IngressMember(ingress="i-none", started=1.0)


def router_member(pool: str) -> RouterMember:
    return RouterMember(router="r-none", pool=pool)


def card(pool: str, model: str = "rogue", **changed: Any) -> ModelCard:
    """A card whose files do not exist."""
    options: dict[str, Any] = {
        "context_length": 100,
        "block_size": 16,
        "files": {"tokenizer.json": CardFile("nowhere", "00", 5)},
        "media": {"image": MediaSlot("<i>", 5, 3, [1, 2])},
        "template_kwargs": {"a": 1},
        "default_sampling": {"a": 1},
        "aliases": ["rogue-alias"],
        "adapters": ["rogue-adapter"],
        "eos_token_ids": [2],
        **changed,
    }
    return ModelCard(model=model, pool=pool, **options)


# The known ones.


@dataclass(frozen=True)
class Known:
    """A message of the audit: it ended processes, or the service, by itself. `subject` has the names of a deployment in it."""

    name: str
    subject: str
    data: bytes
    headers: dict[str, str] = field(default_factory=dict)


def known(pool: str) -> list[Known]:
    """The messages of the audit that need no files. Subjects name `{pool}`, `{worker}`, `{ingress}`."""
    whole = plain(envelope(pool))
    request, work = "hr.req.{pool}.std.x", "hr.work.{pool}.{worker}"
    part = Row("nothing", 1, 1, 0, 0, [1], [[Part("tool", "b", 10**12, "c", "d")]])
    unknown = Row("nothing", 1, 1, 0, 0, [1], ["a"], None, Finish(reason="stop"))
    dotted = plain(Frame(worker="w", rows=[unknown]))
    found = [
        Known("judge with a blank", request, packed({**whole, "judge": "a b"})),
        Known("judge with a blank, placed", work, packed({**whole, "judge": "a b", "id": "poison2"})),
        Known(
            "worker with a dot ends a request",
            "hr.out.{ingress}",
            packed({**dotted, "worker": "a.b"}),
        ),
        Known("huge index of a tool call", "hr.out.{ingress}", packed(plain(Frame(worker="w-none", rows=[part])))),
        Known("deep nesting", request, DEEP_MAP),
        Known("deep nesting, placed", work, DEEP_MAP),
        Known("deep nesting in a frame", "hr.out.{ingress}", DEEP_MAP),
    ]
    for deadline in (math.inf, math.nan, -1.0, 1e300):
        found.append(Known(f"deadline {deadline}", request, packed({**whole, "deadline": deadline, "id": f"d{deadline}"})))
        found.append(Known(f"deadline {deadline}, placed", work, packed({**whole, "deadline": deadline, "id": f"e{deadline}"})))
    huge = {"Hr-Attempt": "9" * 21}
    found.append(Known("huge attempt", request, packed({**whole, "id": "h1"}), huge))
    found.append(Known("huge attempt, placed", work, packed({**whole, "id": "h2"}), huge))
    return found
