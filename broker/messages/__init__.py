"""Defines every message that Headrace puts on the wire, as typed, immutable records.

All are msgpack.  Records are maps with the field names below, except `Row` and the small tuples inside it, which are arrays to
keep the token path cheap.  Readers ignore fields (and trailing array items) that they do not know; `v` is the major version
and a reader refuses one that is higher than its own.  `docs/wire.md` is this module in prose.

`gc=False` exempts records that come by the hundred thousand, and hold no cycles, from garbage collection.

Times are Unix seconds (float), durations are seconds, token ids are u32, block chain values are u64.
"""

from __future__ import annotations

from headrace.broker.messages.base import WIRE_VERSION, Record
from headrace.broker.messages.control import (
    Abort,
    Answers,
    CancelJob,
    Check,
    CheckReply,
    Claim,
    ClaimReply,
    Done,
    Drain,
    HistoryEntry,
    IngressControl,
    Inspect,
    Inspection,
    KvDump,
    LoadAdapter,
    Ping,
    Refuse,
    RefuseReply,
    RunRef,
    RunVerdict,
    Since,
    SinceItem,
    Suspicion,
    SuspicionQuery,
    UnloadAdapter,
    Verdict,
    WorkerControl,
)
from headrace.broker.messages.dead_letters import DeadLetter, Unreadable
from headrace.broker.messages.events import Cancel, EventKind, JobEvent, JobEvents, LoadReport
from headrace.broker.messages.frames import Finish, FinishReason, Frame, JobFault, Part, Row, Text, TokenLogprob
from headrace.broker.messages.kv import KvMessage, KvReset, KvStep
from headrace.broker.messages.members import IngressMember, RouterMember, WorkerMember
from headrace.broker.messages.placements import Candidate, Decided, Explain, Explanation, Routed, RouterControl
from headrace.broker.messages.requests import (
    HEADER_ATTEMPT,
    HEADER_HISTORY,
    HEADER_PREFILL,
    Envelope,
    Generation,
    Parsing,
    Pooling,
    PoolingInput,
    PoolingTask,
    PrefillDecision,
    Sampling,
    Spill,
)

__all__ = [
    "HEADER_ATTEMPT",
    "HEADER_HISTORY",
    "HEADER_PREFILL",
    "WIRE_VERSION",
    "Abort",
    "Answers",
    "Cancel",
    "CancelJob",
    "Candidate",
    "Check",
    "CheckReply",
    "Claim",
    "ClaimReply",
    "DeadLetter",
    "Decided",
    "Done",
    "Drain",
    "Envelope",
    "EventKind",
    "Explain",
    "Explanation",
    "Finish",
    "FinishReason",
    "Frame",
    "Generation",
    "HistoryEntry",
    "IngressControl",
    "IngressMember",
    "Inspect",
    "Inspection",
    "JobEvent",
    "JobEvents",
    "JobFault",
    "KvDump",
    "KvMessage",
    "KvReset",
    "KvStep",
    "LoadAdapter",
    "LoadReport",
    "Parsing",
    "Part",
    "Ping",
    "Pooling",
    "PoolingInput",
    "PoolingTask",
    "PrefillDecision",
    "Record",
    "Refuse",
    "RefuseReply",
    "Routed",
    "RouterControl",
    "RouterMember",
    "Row",
    "RunRef",
    "RunVerdict",
    "Sampling",
    "Since",
    "SinceItem",
    "Spill",
    "Suspicion",
    "SuspicionQuery",
    "Text",
    "TokenLogprob",
    "UnloadAdapter",
    "Unreadable",
    "Verdict",
    "WorkerControl",
    "WorkerMember",
]
