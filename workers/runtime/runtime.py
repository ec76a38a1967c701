"""Executes claimed jobs on an engine: the runtime stands between the job protocol and the engine.

It turns a claimed job into engine sequences (one per open choice), runs their tokens through the text pipeline, and reports
every engine step to the sink as one batch.  It knows the engine only by its protocol.

Here is what joins the parts, and the path of every token.  What happens to a run until it is in the engine is in
`headrace.workers.runtime.runs`, the engine's side of that in `headrace.workers.runtime.sequences`, all outputs that are
more than a token in `headrace.workers.runtime.outputs`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from math import inf
from typing import NamedTuple

import msgspec
import structlog

from headrace.broker.codec import log_ids
from headrace.broker.messages.events import LoadReport, RankLoad
from headrace.broker.messages.frames import JobFault
from headrace.broker.protocol.run import Run
from headrace.broker.spill import ResultObjects
from headrace.broker.worker.runs import WorkerRuns
from headrace.jetstream.tasks import TaskScope
from headrace.workers import metrics
from headrace.workers.adapter_cache import AdapterFolder
from headrace.workers.adapter_files import AdapterFiles
from headrace.workers.detokenize import TokenTable
from headrace.workers.engine import Engine, EngineInfo, Load, Output, Role
from headrace.workers.errors import AnswerUnreadable, EngineError, RequestInvalid, UnsupportedByEngine, WorkerError
from headrace.workers.parsing.interface import ParserSet
from headrace.workers.runtime.choice import ChoiceRun
from headrace.workers.runtime.outputs import Outputs
from headrace.workers.runtime.pooling import PoolRuns
from headrace.workers.runtime.runs import ChoiceIntake, RemotePrefills, Runs, refuse
from headrace.workers.runtime.sequences import Embeddings, EngineCommands, RawSubmissions, Sequences
from headrace.workers.runtime.watchdog import EngineWork, Watchdog


def rank_loads(ranks: Sequence[RankLoad], load: Load, unsubmitted: Mapping[int, int]) -> list[RankLoad]:
    """Return the load of each rank. `unsubmitted`: tokens that the engine has not got yet, by rank.

    An engine that tells nothing of single ranks is taken to share its blocks and its work out evenly.
    """
    if not ranks:
        return []
    told = load.ranks if len(load.ranks) == len(ranks) else [_share(load, len(ranks))] * len(ranks)
    return [
        msgspec.structs.replace(
            rank,
            waiting=part.waiting,
            blocks_total=part.blocks_total,
            blocks_used=part.blocks_used,
            queued_prefill_tokens=part.queued_prefill_tokens + unsubmitted.get(number, 0),
            step_prefill_tokens=part.step_prefill_tokens,
            step_decodes=part.step_decodes,
        )
        for number, (rank, part) in enumerate(zip(ranks, told, strict=True))
    ]


def _share(load: Load, ranks: int) -> Load:
    return Load(
        waiting=load.waiting // ranks,
        blocks_used=load.blocks_used // ranks,
        blocks_total=load.blocks_total // ranks,
        queued_prefill_tokens=load.queued_prefill_tokens // ranks,
        step_prefill_tokens=load.step_prefill_tokens // ranks,
        step_decodes=load.step_decodes // ranks,
    )


log = structlog.get_logger()


class Stuck(NamedTuple):
    """A stuck sequence. `seconds`: the time since its last token, or since its start."""

    choice: ChoiceRun
    seconds: float
    first: bool  # whether the sequence has no token at all


class StuckSequences:
    """Detects stuck sequences. Checked about once a second, so that the token path has no part in it."""

    def __init__(self, *, first_token_s: float, token_s: float) -> None:
        """Set the longest wait in seconds for the first token of a sequence, and for each token after it."""
        self._first_token_s = first_token_s
        self._token_s = token_s
        self._seen: dict[str, tuple[int, float]] = {}  # tokens it had, and since when it has no more

    def forget(self) -> None:
        self._seen = {}

    def check(self, now_s: float, active: Iterable[ChoiceRun]) -> list[Stuck]:
        """Return the sequences that have waited for too long. Sequences that are not active any more are forgotten."""
        seen, self._seen, stuck = self._seen, {}, []
        for choice in active:
            tokens = len(choice.run.choices[choice.choice].ids)
            before = seen.get(choice.id)
            since_s = now_s if before is None or before[0] != tokens else before[1]
            self._seen[choice.id] = tokens, since_s
            if choice.first_token is not None and not choice.first_token.done():
                continue  # A hand-over has a time limit of its own.
            first = not choice.first_s
            if now_s - since_s > (self._first_token_s if first else self._token_s):
                stuck.append(Stuck(choice, now_s - since_s, first))
        return stuck


def give_up(stuck: Stuck, sink: WorkerRuns) -> None:
    """Move the run of a stuck sequence to another worker, which aborts its sequences in this engine."""
    choice, when = stuck.choice, "first" if stuck.first else "next"
    metrics.STUCK.labels(when).inc()
    ids = log_ids(choice.run.envelope)
    log.warning("sequence.stuck", **ids, sequence=choice.id, seconds=round(stuck.seconds, 1), waits_for=f"{when} token")
    message = f"the engine gave no {when} token for {stuck.seconds:.0f} s"
    sink.retry_elsewhere(choice.run, JobFault("engine_error", message, retriable=True))


CHANGE_S = 120.0  # an engine reads the files of an adapter and copies them to its device


class EngineAdapters:
    """Implements `headrace.broker.worker.ports.AdapterPort`."""

    def __init__(
        self,
        engine: Engine,
        watchdog: Watchdog,
        files: AdapterFiles,
        *,
        folders: Mapping[str, AdapterFolder] | None = None,
        timeout_s: float = CHANGE_S,
    ) -> None:
        """While the engine reads an adapter `watchdog` expects no steps: some engines make none then.

        `folders`: those of the engine's start, name → folder. Each stays open until its adapter is unloaded.
        """
        self._engine = engine
        self._watchdog = watchdog
        self._files = files
        self._folders = dict(folders or {})
        self._timeout_s = timeout_s

    async def load(self, name: str, source: str) -> None:
        """Load an adapter from `source`. Raises UnsupportedByEngine, EngineError."""
        if self._engine.capabilities.lora != "dynamic":
            raise UnsupportedByEngine(
                "this worker's engine was started without room for adapters; for vLLM: --engine-arg enable_lora=true"
            )
        folder = await self._files.open(source)
        try:
            await self._change("load_adapter", {"name": name, "source": str(folder.path)})
        except BaseException:
            folder.close()
            raise
        if (before := self._folders.get(name)) is not None:
            before.close()  # the same folder: the engine would have refused another one
        self._folders[name] = folder

    async def unload(self, name: str) -> None:
        """Unload an adapter. Raises UnsupportedByEngine, EngineError."""
        await self._change("unload_adapter", {"name": name})
        if (folder := self._folders.pop(name, None)) is not None:
            folder.close()

    async def _change(self, operation: str, args: dict[str, str]) -> None:
        self._watchdog.suspend()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._engine.control(operation, args)
        except TimeoutError:
            name = args["name"]
            raise EngineError(f"{operation} of {name!r} did not end within {self._timeout_s:g} s") from None
        finally:
            self._watchdog.resume()


class Runtime:
    """Executes runs on an engine. `attach` a sink before the first run.

    `sequences` is for hand-overs, `raw` accepts sequences without a run, `watchdog` detects a dead engine.
    """

    _info: EngineInfo  # This and the next two are set once a sink is attached.
    _outputs: Outputs
    _runs: Runs

    def __init__(self, engine: Engine, *, stall_s: float, first_token_s: float = inf, token_s: float = inf) -> None:
        """Count the engine as dead when it has work and reports nothing for `stall_s` seconds.

        A sequence that gets no first token for `first_token_s`, or later no token for `token_s`, while others do, is tried on
        another worker.
        """
        self._engine = engine
        self._first_token_s = first_token_s
        self._check_every_s = min(1.0, stall_s / 4)
        self._stuck = StuckSequences(first_token_s=first_token_s, token_s=token_s)
        self.exclusive = asyncio.Lock()  # held by a canary and by a change of role, which must not overlap
        self.watchdog = Watchdog(engine, EngineWork(self._running, self._waiting), stall_s=stall_s)
        self.dead = self.watchdog.dead
        self._commands = EngineCommands(self.watchdog.declare_dead)
        self._scope = TaskScope()
        self.sequences = Sequences(engine, self._commands, self.watchdog, self._scope, refused=self._refused)
        self.raw = RawSubmissions(engine, self._commands, self.watchdog, self._scope, active=self.sequences.active)
        self._pooling = PoolRuns(engine, self.watchdog, self._scope, refused=self._refused)
        self._sink: WorkerRuns | None = None
        self._caches: tuple[Callable[[], Container[int]], ...] = ()
        self._tiers: Callable[[], list[int]] = list
        self._remotes: RemotePrefills | None = None
        self._tapped: Callable[[list[Output]], None] | None = None

    def attach(
        self,
        sink: WorkerRuns,
        info: EngineInfo,
        table: TokenTable,
        remotes: RemotePrefills | None = None,
        *,
        parsers: ParserSet | None = None,
        results: ResultObjects | None = None,
        embeddings: Embeddings | None = None,
    ) -> None:
        """Attach the sink.

        Without `remotes` every prompt is computed here, without `parsers` no answer can be parsed, without `results` a picture
        has to fit into a frame, without `embeddings` the engine encodes all media.
        """
        self._pooling.results = results
        self.sequences.embeddings = self.raw.embeddings = embeddings
        self._sink = sink
        self._info = info
        self._remotes = remotes
        self._outputs = Outputs(sink, self.sequences)
        intake = ChoiceIntake(info, table, parsers)
        self._runs = Runs(self._engine, sink, intake, self.sequences, self._outputs, remotes)

    def watch_cache(self, *devices: Callable[[], Container[int]], tiers: Callable[[], list[int]]) -> None:
        """Set, per rank, the source of the chain values that are cached, by which cached parts of prompts are known.

        `tiers` counts the blocks that all ranks hold together, per tier.
        """
        self._caches = devices
        self._tiers = tiers

    def tap(self, sink: Callable[[list[Output]], None] | None) -> None:
        """Send the engine's outputs to `sink` instead; None ends that. Used by the warm-up, before any job is accepted."""
        self._tapped = sink

    async def run(self) -> None:
        """Feed the engine and watch it, until cancelled. Resolves `dead` when the engine is gone."""
        async with self._scope as scope:
            scope.spawn(self._commands.run())
            scope.spawn(self.watchdog.watch_death())
            scope.spawn(self.watchdog.watch_stall())
            scope.spawn(self._watch_stuck())

    def suspend(self) -> None:
        """Expect nothing of the engine: it is about to stand still, with its sequences inside."""
        self.watchdog.suspend()

    def resume(self) -> None:
        self.watchdog.resume()

    def blamed(self) -> frozenset[str]:
        """Return the ids of the requests that a dead engine names as the cause, as far as they are here."""
        active = self.sequences.active
        return frozenset(active[sequence].run.id for sequence in self._engine.blamed() if sequence in active)

    def _running(self) -> int:
        return len(self.sequences.active) + len(self.raw) + len(self._pooling)

    def _waiting(self) -> bool:
        """Return True if a sequence may wait for another worker: on either side of a hand-over."""
        handed_over = (choice.first_token for choice in self.sequences.active.values())
        return len(self.raw) > 0 or any(token is not None and not token.done() for token in handed_over)

    async def _watch_stuck(self) -> None:
        """Move runs with stuck sequences to other workers, while the engine lives."""
        loop, active = asyncio.get_running_loop(), self.sequences.active
        while not self.dead.done():
            await asyncio.sleep(self._check_every_s)
            if self.watchdog.suspended:
                self._stuck.forget()
                continue
            for stuck in self._stuck.check(loop.time(), list(active.values())):
                if self._sink is not None and stuck.choice.id in active:
                    give_up(stuck, self._sink)

    def _refused(self, run: Run, error: WorkerError) -> None:
        if self._sink is not None:
            refuse(self._sink, run, error)

    # -- Executor --------------------------------------------------------------------------------------------

    def start(self, run: Run, payload: bytes) -> None:
        assert self._sink is not None  # attached before the session can start anything  # noqa: S101
        if run.envelope.kind == "pool":
            self._pooling.start(run, payload, sink=self._sink, info=self._info)
        else:
            self._runs.start(run, payload, cache=self._caches[run.rank or 0] if self._caches else None)

    def stop(self, run: Run) -> None:
        self._pooling.stop(run)
        self._runs.stop(run)

    def resumable(self, run: Run) -> bool:
        return self._runs.resumable(run)

    def park(self, run: Run) -> None:
        self._runs.park(run)

    def unpark(self, run: Run) -> None:
        self._runs.unpark(run)

    def load(self, report: LoadReport) -> LoadReport:
        load = self._engine.load()
        if self._remotes is not None:
            report = self._remotes.load(report)
        return msgspec.structs.replace(
            report,
            waiting=load.waiting,
            blocks_total=load.blocks_total,
            blocks_used=load.blocks_used,
            queued_prefill_tokens=load.queued_prefill_tokens + self.sequences.unsubmitted,
            step_s=load.step_s,
            step_prefill_tokens=load.step_prefill_tokens,
            step_decodes=load.step_decodes,
            tiers=self._tiers(),
            ranks=rank_loads(report.ranks, load, self.sequences.unsubmitted_by),
        )

    async def set_role(self, role: str) -> None:
        """Change the engine's role. Raises UnsupportedByEngine."""
        try:
            wanted = Role(role)
        except ValueError:
            raise UnsupportedByEngine(f"there is no role {role!r}; there are {', '.join(Role)}") from None
        async with self.exclusive:
            await self._engine.set_role(wanted)

    # -- the engine's steps ----------------------------------------------------------------------------------

    def on_step(self, outputs: list[Output]) -> None:
        """Process the outputs of an engine step. The engine's sink."""
        now = self.watchdog.stepped()
        if self._tapped is not None:
            self._tapped(outputs)
            return
        sink = self._sink
        if sink is None:
            return
        active, append_token = self.sequences.active, sink.append_token
        for output in outputs:
            try:
                choice = active[output.id]
            except KeyError:
                if self.raw:
                    self.raw.on_output(output)
                continue
            try:
                match output.ids:
                    case [token] if choice.plain and not (output.finish or output.fault or output.logprobs):  # nearly always
                        append_token(choice.run, choice.choice, output.ids, choice.push(token))
                    case _:
                        self._outputs.take(choice, output, now)
            except (AnswerUnreadable, RequestInvalid) as error:
                self._runs.give_up(choice.run, error)
        sink.flush()
