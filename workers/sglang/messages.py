"""Defines the messages between a worker and its SGLang child process."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from headrace.workers.engine import Capabilities, EngineConfig, EngineInfo, Load, Output, PoolItem, Sequence

ErrorKind = Literal["invalid", "unsupported", "overloaded", "failed"]


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The first message to the child. `kv_events` are SGLang's settings for publishing its KV events."""

    config: EngineConfig
    kv_events: dict[str, Any] | None = None


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """A sequence to run. Answered by `Reply`."""

    call: int
    sequence: Sequence


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Sequences and inputs to stop. Not answered."""

    ids: list[str]


class PoolInput(msgspec.Struct, frozen=True, tag="pool"):
    """An input to compute a vector for. Answered by `Reply` with the vector and its cached tokens."""

    call: int
    item: PoolItem


class Control(msgspec.Struct, frozen=True, tag="control"):
    """An operation of `Engine.control`. Answered by `Reply`."""

    call: int
    operation: str
    args: dict[str, Any]


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """The last message to the child, which ends its processes and itself."""


ToChild = Start | Submit | Abort | PoolInput | Control | Stop


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The engine can serve."""

    info: EngineInfo
    capabilities: Capabilities


class ChildStartFailed(msgspec.Struct, frozen=True, tag="start_failed"):
    """The engine cannot be started. The child ends."""

    message: str


class StepOutputs(msgspec.Struct, frozen=True, tag="outputs"):
    """All outputs of an engine step, and the load after it."""

    outputs: list[Output]
    load: Load


class LoadReport(msgspec.Struct, frozen=True, tag="load"):
    """The load between steps."""

    load: Load


class Error(msgspec.Struct, frozen=True):
    """A failed call: `invalid` is the request's fault, `overloaded` may succeed on another worker."""

    kind: ErrorKind
    message: str
    param: str | None = None


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """The answer to the call with this number."""

    call: int
    value: Any = None
    error: Error | None = None


ToWorker = Started | ChildStartFailed | StepOutputs | LoadReport | Reply
