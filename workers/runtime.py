"""The worker runtime: between the job protocol above and one engine below.

It turns a claimed job into engine sequences (one per open choice), runs their tokens through the text pipeline, and reports
every engine step to the session as one batch.  It knows the engine only by its protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container, Mapping
from functools import partial
from math import inf
from typing import Any, Protocol

import msgspec
import structlog

from broker.errors import WireError
from broker.messages import Finish, FinishReason, Generation, JobFault, LoadReport, PrefillDecision, Text, TokenLogprob
from broker.protocol.runs import Run
from broker.worker import WorkerSession
from workers import metrics
from workers.choice import ChoiceRun
from workers.engine import Engine, EngineInfo, Fault, Handover, Output, Role, Sequence
from workers.errors import AnswerUnreadable, EngineDead, EngineOverloaded, RequestInvalid, UnsupportedByEngine, WorkerError
from workers.handover.remote import RemotePrefill
from workers.intake import Intake
from workers.parsing.interface import ParserSet
from workers.pooling import PoolRuns
from workers.progress import Progress, Stuck
from workers.prompt_logprobs import check_size, fitting
from workers.replaying import INLINE_TOKENS, replay, replay_in_slices, tokens_to_replay
from workers.resume import cannot_resume
from workers.text.pipeline import TokenTable

log = structlog.get_logger()

Command = Callable[[], Awaitable[None]]


class Remotes(Protocol):
    """Says which prompts other workers compute (`workers.handover.desk.HandoverDesk`)."""

    def decide(self, run: Run, choices: list[ChoiceRun], generation: Generation) -> PrefillDecision: ...

    def remote(self, choices: list[ChoiceRun], decision: PrefillDecision, payload: bytes) -> RemotePrefill: ...

    def load(self, report: LoadReport) -> LoadReport:
        """Fill in what load reports say of hand-overs."""


class Runtime:
    """Executes runs on one engine. `attach` the session before the first run."""

    def __init__(self, engine: Engine, *, stall_s: float, first_token_s: float = inf, token_s: float = inf) -> None:
        """The engine is dead when it has work and reports nothing for `stall_s`. A sequence that gets nothing for
        `first_token_s` or, later, `token_s` while others do is tried elsewhere."""
        self._engine = engine
        self._progress = Progress(first_token_s=first_token_s, token_s=token_s)
        self.exclusive = asyncio.Lock()  # for what must not meet: a canary and a change of role
        self._stall_s = stall_s
        self._session: WorkerSession | None = None
        self._info: EngineInfo | None = None
        self._intake: Intake | None = None
        self._active: dict[str, ChoiceRun] = {}
        self._parked: dict[Run, list[ChoiceRun]] = {}
        self._replaying: dict[Run, asyncio.Task[None]] = {}  # not in the engine yet
        self._raw: dict[str, Callable[[Output], None]] = {}  # sequences that belong to no run, and who gets their outputs
        # Submissions and aborts in one queue, so that an abort never overtakes its submission. Bounded by the slots.
        self._commands: asyncio.Queue[Command] = asyncio.Queue()
        self._unsubmitted = 0  # tokens to be computed of what is in `_commands`
        self._remotes: Remotes | None = None
        self._remote: dict[Run, tuple[RemotePrefill, asyncio.Task[None]]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._cache: Callable[[], Container[int]] | None = None
        self._last_step_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._heard_s = self._loop.time()
        self._pooling = PoolRuns(engine, refused=self._refused, dead=self.declare_dead, progress=self.stepped)
        self._tapped: Callable[[list[Output]], None] | None = None
        self.dead: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def attach(
        self,
        session: WorkerSession,
        info: EngineInfo,
        table: TokenTable,
        remotes: Remotes | None = None,
        *,
        parsers: ParserSet | None = None,
    ) -> None:
        """Without `remotes` every prompt is computed here, without `parsers` no answer can be taken apart."""
        self._session = session
        self._info = info
        self._intake = Intake(info, table, parsers)
        self._remotes = remotes

    def watch_cache(self, device: Callable[[], Container[int]]) -> None:
        """`device()` has the chain values of what the engine has cached: by them prompts are known to be partly computed."""
        self._cache = device

    def tap(self, sink: Callable[[list[Output]], None] | None) -> None:
        """Send the engine's outputs elsewhere: used by the warm-up, before any job is taken."""
        self._tapped = sink

    # -- life ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Feed the engine and watch it, until cancelled. Resolves `dead` when the engine is gone."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            tasks.create_task(self._feed())
            tasks.create_task(self._watch_death())
            tasks.create_task(self._watch_stall())

    async def _feed(self) -> None:
        while True:
            command = await self._commands.get()
            try:
                await command()
            except EngineDead as error:
                self.declare_dead(str(error))
            except WorkerError as error:
                log.warning("engine.command_failed", error=str(error))

    async def _submit_here(self, choice: ChoiceRun) -> None:
        self._unsubmitted -= choice.uncached
        if self._tasks is not None and (choice.generation.media or choice.prompt_embeds is not None):
            # These take the engine a while to read. Others need not wait, and an abort may come in between.
            self._tasks.create_task(self._submit_aside(choice))
        else:
            await self._submit(choice, choice.id, None)

    async def _submit_aside(self, choice: ChoiceRun) -> None:
        try:
            await self._submit(choice, choice.id, None)
        except EngineDead as error:
            self.declare_dead(str(error))

    async def _submit(self, choice: ChoiceRun, sequence_id: str, handover: Handover | None) -> None:
        if self._session is None or self._active.get(sequence_id) is not choice:
            return  # taken back meanwhile
        run = choice.run
        try:
            await self._engine.submit(choice.sequence(handover))
        except EngineDead:
            raise
        except WorkerError as error:
            if handover is not None:  # the hand-over is wrong, not the request: computed here it will do
                self._no_handover(choice, Fault("transfer_failed", str(error), retriable=True))
            else:
                self._refused(run, error)

    def _refused(self, run: Run, error: WorkerError) -> None:
        """The engine did not take a sequence of this run."""
        if self._session is None:
            return
        session = self._session
        if isinstance(error, (RequestInvalid, UnsupportedByEngine)):
            session.fail(run, JobFault("invalid_request", str(error), param=error.param))
        elif isinstance(error, EngineOverloaded):
            session.retry_elsewhere(run, JobFault("engine_overloaded", str(error), retriable=True, retry_after_s=1.0))
        elif error.retriable:
            session.retry_elsewhere(run, JobFault("engine_error", str(error), retriable=True))
        else:
            session.fail(run, JobFault("engine_error", str(error)))

    def _unreadable(self, run: Run, error: AnswerUnreadable) -> None:
        """Its parser would fail on the same words anywhere else."""
        self._withdraw(run)
        if self._session is not None:
            self._session.fail(run, JobFault("engine_error", str(error)))

    def declare_dead(self, why: str) -> None:
        """The engine is gone. Only the first reason counts."""
        if not self.dead.done():
            self.dead.set_result(why)

    async def _watch_death(self) -> None:
        self.declare_dead(await self._engine.died())

    def stepped(self) -> None:
        """The engine has shown that it lives."""
        self._last_step_s = self._heard_s = self._loop.time()

    @property
    def idle_s(self) -> float:
        """How long nothing has come from the engine while it had nothing to do; 0 when it has."""
        if self._active or self._raw or len(self._pooling):
            return 0.0
        return self._loop.time() - self._heard_s

    async def _watch_stall(self) -> None:
        """An engine that has work and says nothing is as dead as one that has exited."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(1.0, self._stall_s / 4))
            running = len(self._active) + len(self._raw) + len(self._pooling)
            if not running:
                self._last_step_s = loop.time()
            elif loop.time() - self._last_step_s > self._stall_s:
                metrics.STALLS.inc()
                self.declare_dead(f"no step for {self._stall_s:g} s with {running} sequences running")
                return
            for stuck in self._progress.look(loop.time(), list(self._active.values())):
                self._give_up(stuck)

    def _give_up(self, stuck: Stuck) -> None:
        """Others may do better. What the engine has of it is aborted when its run is moved."""
        choice, when = stuck.choice, "first" if stuck.first else "next"
        if self._session is None or choice.id not in self._active:
            return
        metrics.STUCK.labels(when).inc()
        log.warning("sequence.stuck", sequence=choice.id, seconds=round(stuck.seconds, 1), waits_for=f"{when} token")
        message = f"the engine gave no {when} token for {stuck.seconds:.0f} s"
        self._session.retry_elsewhere(choice.run, JobFault("engine_error", message, retriable=True))

    # -- Executor --------------------------------------------------------------------------------------------

    def start(self, run: Run, payload: bytes) -> None:
        assert self._session is not None  # attached before the session can start anything  # noqa: S101
        if run.envelope.kind == "pool":
            assert self._info is not None and self._tasks is not None  # noqa: S101, PT018
            self._pooling.start(run, payload, session=self._session, info=self._info, tasks=self._tasks)
            return
        assert self._intake is not None  # noqa: S101
        try:
            generation, choices = self._intake.take(run, payload, cache=self._cache)
            if generation.prompt_logprobs is not None and choices:
                most_bytes = self._session.settings.max_frame_bytes
                check_size(len(choices[0].prompt), generation.prompt_logprobs, most_bytes=most_bytes)
        except WireError as error:
            self._session.fail(run, JobFault("invalid_request", f"malformed payload: {error}"))
            return
        except WorkerError as error:
            self._refused(run, error)
            return
        refusal = cannot_resume(run, generation, self._engine.capabilities)
        if refusal is not None:
            self._session.fail(run, JobFault("resume_impossible", refusal, retriable=True))
            return
        if run.resumed:
            metrics.RESUMED.inc()
        if self._tasks is not None and tokens_to_replay(choices) > INLINE_TOKENS:
            self._replaying[run] = self._tasks.create_task(self._replay(run, choices, generation, payload))
            return
        try:
            replay(choices)
        except AnswerUnreadable as error:
            self._refused(run, error)
        else:
            self._begin_all(run, choices, generation, payload)
            self._session.flush()

    async def _replay(self, run: Run, choices: list[ChoiceRun], generation: Generation, payload: bytes) -> None:
        """Begin once what was given out has been replayed."""
        try:
            await replay_in_slices(choices)
        except AnswerUnreadable as error:
            self._refused(run, error)
            return
        finally:
            self._replaying.pop(run, None)
        if run in self._parked:  # meanwhile
            self._parked[run] = choices
        elif self._session is not None:
            self._begin_all(run, choices, generation, payload)
            self._session.flush()

    def _begin_all(self, run: Run, choices: list[ChoiceRun], generation: Generation, payload: bytes) -> None:
        """Whatever has something left to do goes to this engine, or first to another one that computes the prompt."""
        ready = [choice for choice in choices if not self._ended_already(choice)]
        if not ready:
            return
        if self._remotes is not None and self._session is not None:
            decision = self._remotes.decide(run, ready, generation)
            metrics.prefills("remote" if decision.remote else "local", decision.reason).inc()
            if decision.reason == "no_prefill_worker" and decision.refuse:
                fault = JobFault("no_prefill_worker", "no prefill worker is ready", retriable=True, retry_after_s=1.0)
                self._session.fail(run, fault)
                return
            if decision.remote and self._tasks is not None:
                remote = self._remotes.remote(ready, decision, payload)
                task = self._tasks.create_task(remote.run())
                self._remote[run] = (remote, task)
                task.add_done_callback(lambda _: self._remote.pop(run, None))
                return
        for choice in ready:
            self.begin_here(choice)

    def _ended_already(self, choice: ChoiceRun) -> bool:
        """End a choice that needs no engine any more."""
        emitted = len(choice.run.choices[choice.choice].ids)
        stopped = choice.pipeline.stopped if emitted else None
        if stopped is None and emitted < choice.limit:
            if not choice.started_s:
                choice.started_s = self._loop.time()
            return False
        if choice.generation.prompt_logprobs is not None and choice.prompt_logprobs is None and self._session is not None:
            why = "its worker is gone, and the log-probabilities of its prompt with it"
            self._session.fail(choice.run, JobFault("resume_impossible", why, retriable=True))
            return True
        try:
            self._finish(choice, [], [], "length" if stopped is None else "stop", stopped)
        except AnswerUnreadable as error:
            self._unreadable(choice.run, error)
        return True

    def begin_here(self, choice: ChoiceRun) -> None:
        """Have this engine compute its prompt."""
        self._activate(choice)
        self._unsubmitted += choice.uncached
        self._commands.put_nowait(partial(self._submit_here, choice))

    def _activate(self, choice: ChoiceRun) -> None:
        if not self._active:
            self._last_step_s = self._loop.time()
        self._active[choice.id] = choice

    def stop(self, run: Run) -> None:
        self._parked.pop(run, None)
        if (replaying := self._replaying.pop(run, None)) is not None:
            replaying.cancel()
        self._pooling.stop(run)
        self._withdraw(run)

    def resumable(self, run: Run) -> bool:
        able = self._engine.capabilities
        mine = (choice for choice in self._active.values() if choice.run is run)
        return all(cannot_resume(run, choice.generation, able) is None for choice in mine)

    def _withdraw(self, run: Run) -> list[ChoiceRun]:
        mine = [choice for choice in self._active.values() if choice.run is run]
        for choice in mine:
            del self._active[choice.id]
        if mine:
            self._commands.put_nowait(partial(self._engine.abort, [choice.id for choice in mine]))
        if run in self._remote:
            remote, task = self._remote.pop(run)
            task.cancel()
            mine += remote.waiting
        return mine

    # -- hand-overs ------------------------------------------------------------------------------------------

    def hand_over(self, choice: ChoiceRun, handover: Handover) -> asyncio.Future[Fault | None]:
        """Give it to the engine; resolved by its first token (None), or by the fault `transfer_failed`."""
        choice.came = self._loop.create_future()
        self._activate(choice)
        self._commands.put_nowait(partial(self._submit, choice, choice.id, handover))
        return choice.came

    def take_back(self, choice: ChoiceRun, params: Mapping[str, Any] | None) -> None:
        """Abort it in the engine, and let go of what `params` name."""
        if self._active.pop(choice.id, None) is not None:
            self._commands.put_nowait(partial(self._engine.abort, [choice.id]))
        if params is not None:
            self._commands.put_nowait(partial(self._engine.release, choice.id, params))

    def _no_handover(self, choice: ChoiceRun, fault: Fault) -> None:
        self._active.pop(choice.id, None)
        if choice.came is not None and not choice.came.done():
            choice.came.set_result(fault)

    def submit_raw(self, sequence: Sequence, on_output: Callable[[Output], None]) -> None:
        """A sequence that belongs to no run: all outputs go to `on_output`, one with a fault if the engine does not take it."""
        if not self._raw and not self._active:
            self._last_step_s = self._loop.time()
        self._raw[sequence.id] = on_output
        self._commands.put_nowait(partial(self._submit_raw, sequence))

    async def _submit_raw(self, sequence: Sequence) -> None:
        if sequence.id not in self._raw:
            return
        try:
            await self._engine.submit(sequence)
        except EngineDead:
            raise
        except WorkerError as error:
            self._raw_output(Output(sequence.id, [], fault=Fault("engine_error", str(error), error.retriable)))

    def abort_raw(self, sequence_id: str) -> None:
        """Also lets go of what it has on offer. Nothing more of it reaches its taker."""
        if self._raw.pop(sequence_id, None) is not None:
            self._commands.put_nowait(partial(self._engine.abort, [sequence_id]))
        self._commands.put_nowait(partial(self._engine.release, sequence_id, None))

    def _raw_output(self, output: Output) -> None:
        taker = self._raw.get(output.id)
        if taker is None:
            return
        if output.finish is not None or output.fault is not None:
            del self._raw[output.id]
        taker(output)

    async def set_role(self, role: str) -> None:
        """Raises UnsupportedByEngine."""
        try:
            wanted = Role(role)
        except ValueError:
            raise UnsupportedByEngine(f"there is no role {role!r}; there are {', '.join(Role)}") from None
        async with self.exclusive:
            await self._engine.set_role(wanted)

    def park(self, run: Run) -> None:
        if run not in self._parked:
            self._parked[run] = self._withdraw(run)
            metrics.PARKED.inc()

    def unpark(self, run: Run) -> None:
        for choice in self._parked.pop(run, ()):
            if not self._ended_already(choice):
                choice.came = None
                self.begin_here(choice)
        if self._session is not None:
            self._session.flush()

    def load(self, report: LoadReport) -> LoadReport:
        load = self._engine.load()
        if self._remotes is not None:
            report = self._remotes.load(report)
        return msgspec.structs.replace(
            report,
            waiting=load.waiting,
            blocks_total=load.blocks_total,
            blocks_used=load.blocks_used,
            queued_prefill_tokens=load.queued_prefill_tokens + self._unsubmitted,
            step_s=load.step_s,
            step_prefill_tokens=load.step_prefill_tokens,
            step_decodes=load.step_decodes,
        )

    # -- the engine's steps ----------------------------------------------------------------------------------

    def on_step(self, outputs: list[Output]) -> None:
        """The engine's sink."""
        now = self._last_step_s = self._heard_s = self._loop.time()
        if self._tapped is not None:
            self._tapped(outputs)
            return
        session = self._session
        if session is None:
            return
        active, append = self._active, session.append
        for output in outputs:
            choice = active.get(output.id)
            if choice is None:
                if self._raw:
                    self._raw_output(output)
                continue
            ids = output.ids
            try:
                if choice.plain and len(ids) == 1 and output.finish is None and output.fault is None:  # nearly every output
                    append(choice.run, choice.choice, ids, [choice.push(ids[0])], output.logprobs)
                else:
                    self._on_output(session, choice, output, now)
            except AnswerUnreadable as error:
                self._unreadable(choice.run, error)
        session.flush()

    def _on_output(self, session: WorkerSession, choice: ChoiceRun, output: Output, now_s: float) -> None:
        if output.fault is not None:
            if choice.came is not None and not choice.came.done():
                log.info("handover.failed", sequence=choice.id, code=output.fault.code, why=output.fault.message)
                self._no_handover(choice, output.fault)
                return
            del self._active[choice.id]
            fault = JobFault("engine_error", output.fault.message, retriable=output.fault.retriable)
            if output.fault.retriable:
                session.retry_elsewhere(choice.run, fault)
            else:
                session.fail(choice.run, fault)
            return
        if output.cached_tokens is not None:
            choice.cached_tokens = output.cached_tokens
        if output.prompt_tokens is not None:
            choice.prompt_tokens = output.prompt_tokens
        if output.prompt_logprobs is not None and not self._keep_prompt_logprobs(session, choice, output.prompt_logprobs):
            return
        ids = output.ids
        if not choice.first_s and ids:
            self._first_token(session, choice, now_s)
        choice.plain = choice.first_s > 0.0 and not choice.generation.stop
        push = choice.push
        finish = output.finish
        last = len(ids) - 1 if finish is not None else -1
        texts: list[Text] = []
        for index, token in enumerate(ids):
            if index != last:
                texts.append(push(token))
            else:  # a stop token is not part of the text
                hidden = finish == "stop" and not choice.generation.include_stop
                texts.append(choice.pipeline.last(token, hidden=hidden))
            if choice.pipeline.stopped is not None:
                self._stopped_by_string(choice, ids[: index + 1], texts, output)
                return
        if finish == "abort":
            del self._active[choice.id]
            session.retry_elsewhere(choice.run, JobFault("engine_error", "the engine aborted the sequence", retriable=True))
        elif finish is not None:
            self._finish(choice, ids, texts, finish, output.stop, output)
        else:
            session.append(choice.run, choice.choice, ids, texts, logprobs=output.logprobs)

    def _keep_prompt_logprobs(self, session: WorkerSession, choice: ChoiceRun, items: list[TokenLogprob | None]) -> bool:
        """For the end of the answer; False when they are too large, and the run has ended with that."""
        most_bytes = session.settings.max_frame_bytes
        try:
            choice.prompt_logprobs = fitting(items, prompt_tokens=choice.prompt_tokens, most_bytes=most_bytes)
        except RequestInvalid as error:
            self._withdraw(choice.run)
            self._refused(choice.run, error)
            return False
        return True

    def _first_token(self, session: WorkerSession, choice: ChoiceRun, now_s: float) -> None:
        choice.first_s = now_s
        metrics.FIRST_TOKEN_S.observe(now_s - choice.started_s)
        tokens = choice.prompt_tokens + choice.run.choices[choice.choice].start
        computed = tokens - choice.cached_tokens
        if choice.came is not None:
            computed = min(computed, choice.computed_elsewhere)
            if not choice.came.done():
                choice.came.set_result(None)
        if not choice.told:
            choice.told.append(True)
            session.prefilled(choice.run, max(0, computed))

    def _stopped_by_string(self, choice: ChoiceRun, ids: list[int], texts: list[Text], output: Output) -> None:
        if output.finish is None:
            self._commands.put_nowait(partial(self._engine.abort, [choice.id]))
        self._finish(choice, ids, texts, "stop", choice.pipeline.stopped, output)

    def _finish(
        self,
        choice: ChoiceRun,
        ids: list[int],
        texts: list[Text],
        reason: FinishReason,
        stop: str | int | None,
        output: Output | None = None,
    ) -> None:
        assert self._session is not None  # noqa: S101
        self._active.pop(choice.id, None)
        run = choice.run
        completion_tokens = len(run.choices[choice.choice].ids) + len(ids)
        logprobs = output.logprobs[: len(ids)] if output is not None and output.logprobs is not None else None
        tail = choice.pipeline.finish()
        if choice.pipeline.stopped is not None:  # the held-back end may turn out to be a stop string only now
            reason, stop = "stop", choice.pipeline.stopped
        reason, reasoning_tokens = choice.verdict(reason)
        fin = Finish(
            reason=reason,
            stop=stop,
            tail=tail,
            prompt_tokens=choice.prompt_tokens,
            completion_tokens=completion_tokens,
            cached_tokens=min(max(choice.cached_tokens, choice.cached_elsewhere), choice.prompt_tokens),
            reasoning_tokens=reasoning_tokens,
            prompt_logprobs=choice.prompt_logprobs,
        )
        metrics.PROMPT_TOKENS.inc(choice.prompt_tokens)
        metrics.COMPLETION_TOKENS.inc(completion_tokens)
        self._session.append(run, choice.choice, ids, texts, logprobs=logprobs, fin=fin)
