"""Executes claimed jobs on an engine: the runtime stands between the job protocol and the engine.

It turns a claimed job into engine sequences (one per open choice), runs their tokens through the text pipeline, and reports
every engine step to the sink as one batch.  It knows the engine only by its protocol.

Here is what joins the parts, and the path of every token.  What happens to a run until it is in the engine is in
`headrace.workers.runtime.runs`, the engine's side of that in `headrace.workers.runtime.sequences`, all outputs that are
more than a token in `headrace.workers.runtime.outputs`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container
from math import inf

import msgspec

from headrace.broker.messages import LoadReport
from headrace.broker.protocol.run import Run
from headrace.broker.worker.ports import RunSink
from headrace.jetstream.tasks import TaskScope
from headrace.workers.engine import Engine, EngineInfo, Output, Role
from headrace.workers.errors import AnswerUnreadable, RequestInvalid, UnsupportedByEngine, WorkerError
from headrace.workers.parsing.interface import ParserSet
from headrace.workers.runtime.engine_commands import EngineCommands
from headrace.workers.runtime.intake import ChoiceIntake
from headrace.workers.runtime.internal_sequences import RawSubmissions
from headrace.workers.runtime.media_embeddings import Embeddings
from headrace.workers.runtime.outputs import Outputs
from headrace.workers.runtime.pooling import PoolRuns, ResultStore
from headrace.workers.runtime.rank_loads import rank_loads
from headrace.workers.runtime.refusal import refuse
from headrace.workers.runtime.runs import RemotePrefills, Runs
from headrace.workers.runtime.sequences import Sequences
from headrace.workers.runtime.stuck_sequences import StuckSequences, give_up
from headrace.workers.runtime.watchdog import EngineWork, Watchdog
from headrace.workers.text.pipeline import TokenTable


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
        self._sink: RunSink | None = None
        self._caches: tuple[Callable[[], Container[int]], ...] = ()
        self._tiers: Callable[[], list[int]] = list
        self._remotes: RemotePrefills | None = None
        self._tapped: Callable[[list[Output]], None] | None = None

    def attach(
        self,
        sink: RunSink,
        info: EngineInfo,
        table: TokenTable,
        remotes: RemotePrefills | None = None,
        *,
        parsers: ParserSet | None = None,
        results: ResultStore | None = None,
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
        """Expect steps again."""
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
            ids = output.ids
            try:
                if choice.plain and len(ids) == 1 and not (output.finish or output.fault or output.logprobs):  # nearly always
                    append_token(choice.run, choice.choice, ids, choice.push(ids[0]))
                else:
                    self._outputs.take(choice, output, now)
            except (AnswerUnreadable, RequestInvalid) as error:
                self._runs.give_up(choice.run, error)
        sink.flush()
