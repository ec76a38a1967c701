"""The state of one worker session, without I/O: its runs, its announced member record, and what it may take.

The parts of the session share this object and the ports they use; none of them knows the session.  Everything happens on one
event loop, so the state is consistent between two awaits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec
import structlog

from headrace.broker.codec import encode
from headrace.broker.membership.members import Members
from headrace.broker.messages.events import LoadReport
from headrace.broker.messages.frames import Finish, JobFault, Text, TokenLogprob
from headrace.broker.messages.members import WorkerMember
from headrace.broker.messages.requests import EncodeMedia, MediaEncoded, Record
from headrace.broker.prefill_client import PrefillClient
from headrace.broker.prefill_server import PrefillExecutor, PrefillServer
from headrace.broker.protocol.run import Run
from headrace.broker.protocol.runs import RunTable, Tombstones
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import REQUEST_CLASSES
from headrace.jetstream.topology import request_consumer, work_consumer

PLACED_FORGOTTEN_S = 10.0  # after so long a placed request that never arrived gives its slot back


class AdaptersUsed:
    """The order in which adapters that were loaded while the worker serves were last asked for."""

    def __init__(self) -> None:
        self._order: dict[str, None] = {}

    def loaded(self, name: str) -> None:
        self._order.pop(name, None)
        self._order[name] = None

    def used(self, name: str) -> None:
        """Note a request for an adapter. Those of the worker's start are not kept here: they stay loaded."""
        if name in self._order:
            self.loaded(name)

    def unloaded(self, name: str) -> None:
        self._order.pop(name, None)

    def least_recent_first(self) -> tuple[str, ...]:
        return tuple(self._order)


class WorkerState:
    """The state of one worker of one pool.

    * `member`: the record that the worker announces with its lease; replaced by `update_member`.
    * `draining`: a drain or the death of the engine was announced; the worker takes no more work, for good.
    * `withdrawn`: why the worker takes nothing for a while: it changes its role, sleeps or is paused; empty = it is in service.
    * `engine_dead`: no run can be started.
    * `unloading`: adapters that are no longer announced, but still in the engine.
    * `adapters_used`: those that were loaded while the worker serves, in the order of their last use.
    """

    def __init__(self, member: WorkerMember, *, slots: int, tombstone_s: float) -> None:
        """`tombstone_s`: how long a cancelled request id is remembered."""
        self.worker = member.worker
        self.pool = member.pool
        self.member = member
        self.slots = slots
        self.runs = RunTable()
        self.tombstones = Tombstones(keep_s=tombstone_s)
        self.draining = False
        self.withdrawn: Literal["", "role", "sleep", "pause"] = ""
        self.engine_dead = False
        self.unloading: set[str] = set()
        self.adapters_used = AdaptersUsed()
        self._placed: dict[tuple[str, int], float] = {}  # id and attempt → when the worker placed it on itself
        self._callbacks: list[Callable[[], None]] = []
        self._load_callbacks: list[Callable[[], None]] = []

    def on_change(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def on_load_change(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the next load report will differ, though the worker may take no more and no less."""
        self._load_callbacks.append(callback)

    def changed(self) -> None:
        for callback in self._callbacks:
            callback()

    def load_changed(self) -> None:
        for callback in self._load_callbacks:
            callback()

    def update_member(self, **changes: Any) -> None:
        self.member = msgspec.structs.replace(self.member, **changes)

    @property
    def taking(self) -> bool:
        return not self.draining and not self.withdrawn

    @property
    def open_slots(self) -> int:
        """The slots of the engine for ordinary jobs; 0 while the worker is on trial."""
        return 0 if self.runs.on_trial else self.slots

    @property
    def free_slots(self) -> int:
        """Slots that no run holds; on trial those that more suspects may take. Negative: more sequences than slots."""
        free = self.slots - self.runs.sequences
        return min(free, self.runs.group_limit - len(self.runs.suspects)) if self.runs.on_trial else free

    @property
    def room(self) -> int:
        return 0 if self.runs.on_trial else self.free_slots - len(self._placed)

    def usable(self, adapter: str) -> bool:
        return not adapter or adapter in self.member.adapters or adapter in self.unloading

    # Requests that the worker places on itself, on their way from REQ to its own consumer.

    def placed(self, request_id: str, attempt: int, now_s: float) -> None:
        self._placed[request_id, attempt] = now_s

    def arrived(self, request_id: str, attempt: int) -> None:
        """Free the slot that was kept for a request: it is here, and its run holds one, or it does not come."""
        self._placed.pop((request_id, attempt), None)

    def forget_placed(self, now_s: float) -> None:
        """Free the slots of placed requests that have not arrived within `PLACED_FORGOTTEN_S`."""
        for key, since_s in list(self._placed.items()):
            if now_s - since_s > PLACED_FORGOTTEN_S:
                del self._placed[key]


class Executor(Protocol):
    """Runs what the session starts. All calls are synchronous and come on the event loop."""

    def start(self, run: Run, payload: bytes) -> None:
        """Begin a run or, with emitted tokens in `run.choices`, continue it. Progress is reported to the `RunSink`."""

    def stop(self, run: Run) -> None:
        """Abort a run in the engine and free its blocks. Called once for every started run, finished ones too."""

    def resumable(self, run: Run) -> bool:
        """Return whether another worker could continue this run where it stands."""

    def park(self, run: Run) -> None:
        """Stop the engine's sequences and keep the logs: the lease is lost, and enough has been decoded ahead."""

    def unpark(self, run: Run) -> None:
        """Continue a parked run from its log: it is current again. Nothing to do if it was not parked."""

    def load(self, report: LoadReport) -> LoadReport:
        """Fill in the engine's part of a load report."""


class RunSink(Protocol):
    """Takes what the engine makes of runs. All calls are synchronous, on the event loop."""

    @property
    def max_frame_bytes(self) -> int:
        """The largest frame that can be sent."""

    def append(
        self,
        run: Run,
        choice: int,
        ids: list[int],
        texts: list[Text],
        logprobs: list[TokenLogprob] | None = None,
        fin: Finish | None = None,
    ) -> None:
        """Take what an engine step gave one choice. `flush` sends it, together with the rest of the step."""

    def append_token(self, run: Run, choice: int, ids: list[int], text: Text) -> None:
        """Take one token in `ids` with its text and nothing else, as nearly every output is: the short way of `append`."""

    def flush(self) -> None:
        """Send one frame per ingress for everything appended since the last flush."""

    def prefilled(self, run: Run, uncached: int, fetch_ms: int = 0) -> None:
        """Report the first token of a run; `uncached` prompt tokens had to be computed for it.

        `fetch_ms`: how long it waited for blocks that another worker has computed; 0 = there were none.
        """

    def fail(self, run: Run, fault: JobFault) -> None:
        """End a run with a fault that no other worker could avoid."""

    def retry_elsewhere(self, run: Run, fault: JobFault) -> None:
        """Move a run whose fault another worker may avoid."""


class AdapterPort(Protocol):
    async def load(self, name: str, source: str) -> None:
        """Load an adapter; fine when the engine has it from this source already. Raises HeadraceError with the reason."""

    async def unload(self, name: str) -> None:
        """Unload an adapter that no run uses. Raises HeadraceError."""


class EngineOperations(Protocol):
    """The operations of one engine that operators ask for. All raise HeadraceError with the reason if they fail."""

    def check(self, operation: str, *, level: int = 0) -> None:
        """Raise HeadraceError if the engine as started cannot do this: sleep (at a level), pause, reset_cache or profile."""

    async def health(self, *, canary: bool, timeout_s: float) -> tuple[bool, dict[str, Any]]:
        """Return whether the engine can serve, and what was found. With `canary` it is asked for a token, too."""

    async def sleep(self, level: int) -> dict[str, Any]:
        """Free the memory of an engine without sequences. Returns what was measured."""

    async def wake(self, level: int) -> dict[str, Any]:
        """End a sleep and warm the engine up. Returns what was measured."""

    async def pause(self) -> dict[str, Any]:
        """Stop the engine's steps. Its sequences stay."""

    async def resume(self) -> dict[str, Any]:
        """Let the engine go on."""

    async def reset_cache(self) -> dict[str, Any]:
        """Empty the prefix cache."""

    async def profile(self, action: str) -> dict[str, Any]:
        """Start or stop the profiler. Returns where it writes."""

    def set_log_level(self, level: str) -> None:
        """Change the level from which this process logs."""


class EncodePort(Protocol):
    def begin(self, job: EncodeMedia, answer: Callable[[MediaEncoded], None]) -> None:
        """Begin to encode an item. `answer` is called once, at the latest at its end."""


class KvPort(Protocol):
    async def run(self, lease_held: Callable[[], bool]) -> None:
        """Publish until cancelled, only while `lease_held()`."""

    def lease_gained(self) -> None:
        """Publish (again): the lease is held."""

    def lease_lapsed(self) -> None:
        """Note that the lease was lost: readers may have dropped this worker's blocks."""

    def ask_dump(self) -> str:
        """Publish the whole inventory soon. Returns the reason if it cannot, or nothing."""

    @property
    def state(self) -> str:
        """`ok`, or what is wrong, for operators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePorts:
    """The engine of one worker as its session uses it.

    Without `kv` no cache events are published, without `prefill` no prompts are computed for other workers, without `encode` no
    media encoded.  `set_role` has the
    engine change its role, and raises HeadraceError if it cannot.  Without `adapters` these are those of the start.  Without
    `operations` operators' commands are refused.
    """

    executor: Executor
    kv: KvPort | None = None
    prefill: PrefillExecutor | None = None
    encode: EncodePort | None = None
    set_role: Callable[[str], Awaitable[None]] | None = None
    adapters: AdapterPort | None = None
    operations: EngineOperations | None = None


class HandoverSession(Protocol):
    @property
    def state(self) -> WorkerState:
        """The worker's state; read only."""

    @property
    def members(self) -> Members:
        """The leases as last seen."""

    @property
    def registered(self) -> bool:
        """The lease is held."""

    @property
    def prefill_client(self) -> PrefillClient:
        """The decode worker's side."""

    @property
    def prefill_server(self) -> PrefillServer | None:
        """The prefill worker's side; None for an engine that computes no prompts for other workers."""


class WorkerConsumers:
    """The pool's consumers of REQ, the worker's own of WORK and, for a prefill worker, of PREFILL."""

    def __init__(self, deps: WorkerDeps, state: WorkerState, prefill: PrefillServer | None) -> None:
        self._messaging = deps.messaging
        self._state = state
        self._prefill = prefill
        self._requests = [request_consumer(deps.subjects, state.pool, name) for name in REQUEST_CLASSES]
        self.work = work_consumer(deps.subjects, state.pool, state.worker, deps.secret)

    async def ensure(self) -> None:
        for consumer in (*self._requests, self.work):
            await self._messaging.ensure_consumer(consumer)
        if self._prefill is not None and not self._state.member.serves:
            await self._prefill.ensure_consumers()

    async def forget(self) -> None:
        await self._messaging.delete_consumer(self.work.stream, self.work.name)
        if self._prefill is not None:
            await self._prefill.forget_consumer()


def reply(messaging: Messaging, subject: str, answer: Record) -> None:
    if subject:
        messaging.send(subject, encode(answer))


log = structlog.get_logger()

_SHOWN = ("role", "name", "level", "action", "grace_s")  # not the source of an adapter: an address may have a password in it


def note_command(state: WorkerState, command: Record) -> None:
    """Log an operator's command before it is carried out, for the audit log. NATS does not name the sender."""
    fields = {key: value for key in _SHOWN if (value := getattr(command, key, None)) is not None}
    log.warning(
        "audit.worker_command",
        command=command.__struct_config__.tag,
        worker=state.worker,
        pool=state.pool,
        model=state.member.model,
        **fields,
    )
