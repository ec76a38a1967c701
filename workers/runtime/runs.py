"""Starts, resumes, parks and stops the runs of kind `generate`, until their choices are in an engine.

Emitted tokens are replayed through the pipelines of their choices. Choices that need no engine are ended. The rest go to this
engine, or first to a prefill worker that computes the prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container
from typing import Protocol

from headrace.broker.errors import WireError
from headrace.broker.messages import Generation, JobFault, LoadReport, PrefillDecision
from headrace.broker.protocol.run import Run
from headrace.broker.worker.ports import RunSink
from headrace.workers import metrics
from headrace.workers.engine import Engine
from headrace.workers.errors import AnswerUnreadable, WorkerError
from headrace.workers.runtime.choice import ChoiceRun
from headrace.workers.runtime.intake import ChoiceIntake
from headrace.workers.runtime.outputs import Outputs
from headrace.workers.runtime.prompt_logprobs import check_size
from headrace.workers.runtime.refusal import cannot_resume, refuse
from headrace.workers.runtime.replay import INLINE_TOKENS, replay, replay_in_slices, tokens_to_replay
from headrace.workers.runtime.sequences import Sequences


class RemotePrefill(Protocol):
    """The remote prefill of a run (`headrace.workers.handover.decode_side.RemotePrefillRun`)."""

    @property
    def waiting(self) -> list[ChoiceRun]:
        """Return the choices that are not in the engine yet."""

    async def run(self) -> None:
        """Have the prompt computed, and give all choices to the engine."""


class RemotePrefills(Protocol):
    """Decides which prompts other workers compute (`headrace.workers.handover.coordinator.HandoverCoordinator`)."""

    def decide(self, run: Run, choices: list[ChoiceRun], generation: Generation) -> PrefillDecision: ...

    def remote(self, choices: list[ChoiceRun], decision: PrefillDecision, payload: bytes) -> RemotePrefill: ...

    def load(self, report: LoadReport) -> LoadReport:
        """Fill in the hand-over fields of a load report."""


class Runs:
    """The runs of kind `generate`. Without `remotes` every prompt is computed here."""

    def __init__(
        self,
        engine: Engine,
        sink: RunSink,
        intake: ChoiceIntake,
        sequences: Sequences,
        outputs: Outputs,
        remotes: RemotePrefills | None,
    ) -> None:
        self._engine = engine
        self._sink = sink
        self._intake = intake
        self._sequences = sequences
        self._outputs = outputs
        self._remotes = remotes
        self._parked: dict[Run, list[ChoiceRun]] = {}
        self._scope = sequences.scope
        self._replaying: dict[Run, asyncio.Task[None]] = {}  # runs that are not in the engine yet
        self._remote: dict[Run, tuple[RemotePrefill, asyncio.Task[None]]] = {}
        self._loop = asyncio.get_running_loop()

    # -- begin -------------------------------------------------------------------------------------------------

    def start(self, run: Run, payload: bytes, *, cache: Callable[[], Container[int]] | None) -> None:
        """Begin, or continue. What is wrong with it is told to the sink."""
        try:
            generation, choices = self._intake.take(run, payload, cache=cache)
            if generation.prompt_logprobs is not None and choices:
                most_bytes = self._sink.max_frame_bytes
                check_size(len(choices[0].prompt), generation.prompt_logprobs, most_bytes=most_bytes)
        except WireError as error:
            self._sink.fail(run, JobFault("invalid_request", f"malformed payload: {error}"))
            return
        except WorkerError as error:
            refuse(self._sink, run, error)
            return
        refusal = cannot_resume(run, generation, self._engine.capabilities)
        if refusal is not None:
            self._sink.fail(run, JobFault("resume_impossible", refusal, retriable=True))
            return
        if run.resumed:
            metrics.RESUMED.inc()
        if tokens_to_replay(choices) > INLINE_TOKENS:
            self._replaying[run] = self._scope.spawn(self._replay(run, choices, generation, payload))
            return
        try:
            replay(choices)
        except AnswerUnreadable as error:
            refuse(self._sink, run, error)
        else:
            self._begin_all(run, choices, generation, payload)
            self._sink.flush()

    async def _replay(self, run: Run, choices: list[ChoiceRun], generation: Generation, payload: bytes) -> None:
        """Begin a run once its emitted tokens have been replayed."""
        try:
            await replay_in_slices(choices)
        except AnswerUnreadable as error:
            refuse(self._sink, run, error)
            return
        finally:
            self._replaying.pop(run, None)
        if run in self._parked:  # The run was parked during the replay.
            self._parked[run] = choices
        else:
            self._begin_all(run, choices, generation, payload)
            self._sink.flush()

    def _begin_all(self, run: Run, choices: list[ChoiceRun], generation: Generation, payload: bytes) -> None:
        """Give the unfinished choices to this engine, or first to a prefill worker that computes the prompt."""
        ready = [choice for choice in choices if not self._ended_already(choice)]
        if not ready:
            return
        if self._remotes is not None:
            decision = self._remotes.decide(run, ready, generation)
            metrics.prefills("remote" if decision.remote else "local", decision.reason).inc()
            if decision.reason == "no_prefill_worker" and decision.refuse:
                fault = JobFault("no_prefill_worker", "no prefill worker is ready", retriable=True, retry_after_s=1.0)
                self._sink.fail(run, fault)
                return
            if decision.remote:
                remote = self._remotes.remote(ready, decision, payload)
                task = self._scope.spawn(remote.run())
                self._remote[run] = (remote, task)
                task.add_done_callback(lambda _: self._remote.pop(run, None))
                return
        for choice in ready:
            self._sequences.begin_here(choice)

    def _ended_already(self, choice: ChoiceRun) -> bool:
        """End a choice that needs no engine any more. Returns whether it was one."""
        emitted = len(choice.run.choices[choice.choice].ids)
        stopped = choice.pipeline.stopped if emitted else None
        if stopped is None and emitted < choice.limit:
            if not choice.started_s:
                choice.started_s = self._loop.time()
            return False
        if choice.generation.prompt_logprobs is not None and choice.prompt_logprobs is None:
            why = "its worker is gone, and the log-probabilities of its prompt with it"
            self._sink.fail(choice.run, JobFault("resume_impossible", why, retriable=True))
            return True
        try:
            self._outputs.finish(choice, [], [], "length" if stopped is None else "stop", stopped)
        except AnswerUnreadable as error:
            self.give_up(choice.run, error)
        return True

    # -- pause and end -----------------------------------------------------------------------------------------

    def park(self, run: Run) -> None:
        if run not in self._parked:
            self._parked[run] = self._withdraw(run)
            metrics.PARKED.inc()

    def unpark(self, run: Run) -> None:
        for choice in self._parked.pop(run, ()):
            if not self._ended_already(choice):
                choice.first_token = None
                self._sequences.begin_here(choice)
        self._sink.flush()

    def resumable(self, run: Run) -> bool:
        able = self._engine.capabilities
        return all(cannot_resume(run, choice.generation, able) is None for choice in self._sequences.of(run))

    def stop(self, run: Run) -> None:
        self._parked.pop(run, None)
        if (replaying := self._replaying.pop(run, None)) is not None:
            replaying.cancel()
        self._withdraw(run)

    def give_up(self, run: Run, error: WorkerError) -> None:
        """Refuse a run whose answer cannot be read or sent, as it could not be on any other worker."""
        self._withdraw(run)
        refuse(self._sink, run, error)

    def _withdraw(self, run: Run) -> list[ChoiceRun]:
        mine = self._sequences.withdraw(run)
        if run in self._remote:
            remote, task = self._remote.pop(run)
            task.cancel()
            mine += remote.waiting
        return mine
