"""Runs beam searches: every step is a run of one token in the engine for each open beam.

The choices of such a run are its beams, the best first, and are sent together when the search has ended. Until then nothing has
been sent, so that another worker can begin the search anew; afterwards nothing is left to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import msgspec
import structlog

from headrace.broker.log_ids import log_ids
from headrace.broker.messages import Finish, JobFault, Sampling, Text, TokenLogprob
from headrace.broker.protocol.run import Run
from headrace.broker.worker.ports import RunSink
from headrace.jetstream.tasks import TaskScope
from headrace.workers import metrics
from headrace.workers.capability_check import refuse_undeclared
from headrace.workers.engine import Engine, EngineInfo, Fault, Output, Sequence
from headrace.workers.errors import EngineError, RequestInvalid, UnsupportedByEngine, WorkerError
from headrace.workers.runtime.beam_search import Beam, BeamSearch
from headrace.workers.runtime.choice import ChoiceRun
from headrace.workers.runtime.internal_sequences import RawSubmissions
from headrace.workers.runtime.replay import SLICE_S

log = structlog.get_logger()


class BeamRuns:
    """The runs with `Generation.beams`. Each has a task."""

    def __init__(
        self,
        engine: Engine,
        info: EngineInfo,
        raw: RawSubmissions,
        scope: TaskScope,
        sink: RunSink,
        *,
        refused: Callable[[Run, WorkerError], None],
        step_s: float,
    ) -> None:
        """`refused` is called if a search cannot be. A step that takes longer than `step_s` is tried on another worker."""
        self._engine = engine
        self._info = info
        self._raw = raw
        self._scope = scope
        self._sink = sink
        self._refused = refused
        self._step_s = step_s
        self._searches: dict[Run, _Search] = {}

    def start(self, run: Run, choices: list[ChoiceRun]) -> None:
        """Begin a search. `choices` are all choices of the run. What is wrong with it is told to `refused`."""
        try:
            search = self._search(run, choices)
        except WorkerError as error:
            self._refused(run, error)
            return
        self._searches[run] = search
        self._spawn(search)

    def stop(self, run: Run) -> None:
        """Stop a search, and its sequences in the engine. Nothing happens for other runs."""
        if (search := self._searches.pop(run, None)) is not None:
            search.cancel()

    def park(self, run: Run) -> bool:
        """Stop the sequences of a search and keep its beams. Returns whether the run is a search."""
        search = self._searches.get(run)
        if search is not None:
            search.cancel()
        return search is not None

    def unpark(self, run: Run) -> None:
        """Go on with a parked search. Nothing happens for other runs."""
        search = self._searches.get(run)
        if search is not None and search.task is None:
            self._spawn(search)

    def _search(self, run: Run, choices: list[ChoiceRun]) -> _Search:
        """Raises RequestInvalid and UnsupportedByEngine."""
        first, width = choices[0], len(choices)
        generation = first.generation
        assert generation.beams is not None  # noqa: S101  # the caller asked
        if not self._engine.capabilities.beam_search:
            raise UnsupportedByEngine("this worker's engine does not support beam search", param="use_beam_search")
        if width > self._info.beam_width:
            message = f"a beam search of this worker's engine has at most {self._info.beam_width} beams, not {width}"
            raise RequestInvalid(message, param="n")
        if generation.guided is not None or generation.prompt_logprobs is not None:
            param = "guided" if generation.guided is not None else "prompt_logprobs"
            raise RequestInvalid(f"{param} cannot be combined with use_beam_search", param=param)
        search = BeamSearch(
            width=width,
            prompt_tokens=len(first.prompt),
            max_tokens=first.limit,
            end_ids=() if generation.sampling.ignore_eos else self._info.eos_token_ids,
            length_penalty=generation.beams.length_penalty,
            keep_end=generation.include_stop,
            alternatives=generation.logprobs,
        )
        made = _Search(run, choices, search, asyncio.get_running_loop().time())
        refuse_undeclared(self._engine.capabilities, made.sequence(0, search.open[0]))
        return made

    def _spawn(self, search: _Search) -> None:
        search.tries += 1
        search.task = self._scope.spawn(self._run(search))

    async def _run(self, search: _Search) -> None:
        run, beams = search.run, search.beams
        try:
            while not beams.done:
                beams.advance(await self._step(search))
            rows = await _rows(search)
        except _StepFailed as failed:
            self._searches.pop(run, None)
            fault = failed.fault
            ends = self._sink.retry_elsewhere if fault.retriable else self._sink.fail
            ends(run, JobFault(fault.code, fault.message, retriable=fault.retriable))
        except WorkerError as error:
            self._searches.pop(run, None)
            self._refused(run, error)
        except Exception as error:
            self._searches.pop(run, None)
            log.error("beam_search.crashed", **log_ids(run.envelope), exc_info=error)
            fault_of = JobFault("engine_error", f"{type(error).__name__}: {error}", retriable=True)
            self._sink.retry_elsewhere(run, fault_of)
        else:
            self._searches.pop(run, None)
            for choice, ids, texts, logprobs, fin in rows:
                self._sink.append(run, choice, ids, texts, logprobs=logprobs, fin=fin)
            self._sink.flush()

    async def _step(self, search: _Search) -> list[TokenLogprob]:
        """Have the engine report the candidates for each open beam. Raises WorkerError and _StepFailed."""
        loop = asyncio.get_running_loop()
        waiting: dict[str, asyncio.Future[TokenLogprob]] = {}
        for index, beam in enumerate(search.beams.open):
            sequence = search.sequence(index, beam)
            future = waiting[sequence.id] = loop.create_future()
            self._raw.submit_raw(sequence, partial(self._take, search, future))
        try:
            async with asyncio.timeout(self._step_s if self._step_s != float("inf") else None):
                return list(await asyncio.gather(*waiting.values()))
        except TimeoutError:
            message = f"the engine did not report the candidates of a beam search for {self._step_s:g} s"
            raise _StepFailed(Fault("engine_error", message, retriable=True)) from None
        finally:
            for sequence_id, future in waiting.items():
                if future.cancelled() or not future.done():
                    self._raw.abort_raw(sequence_id)
                else:
                    future.exception()  # The first failure of a step decides; the others are not looked at.

    def _take(self, search: _Search, future: asyncio.Future[TokenLogprob], output: Output) -> None:
        """Take an output of a sequence of one token."""
        if future.done():
            return
        if output.fault is not None:
            future.set_exception(_StepFailed(output.fault))
            return
        if output.logprobs:
            found = output.logprobs[0]
            if len(found.top) < search.beams.candidates:
                told = f"{len(found.top)} candidates of a token instead of {search.beams.candidates}"
                future.set_exception(EngineError(f"beam search: the engine reported {told}"))
                return
            if not search.beams.steps and search.cached_tokens is None:
                self._first(search, output)
            future.set_result(found)
        elif output.finish is not None:
            retriable = output.finish == "abort"
            message = "the engine aborted a step of a beam search" if retriable else "the engine reported no log-probabilities"
            future.set_exception(_StepFailed(Fault("engine_error", message, retriable=retriable)))

    def _first(self, search: _Search, output: Output) -> None:
        """Take what the engine tells of the prompt."""
        search.cached_tokens = output.cached_tokens or 0
        if output.prompt_tokens is not None:
            for choice in search.choices:
                choice.prompt_tokens = output.prompt_tokens
        metrics.FIRST_TOKEN_S.observe(asyncio.get_running_loop().time() - search.started_s)
        self._sink.prefilled(search.run, max(0, search.choices[0].prompt_tokens - search.cached_tokens))


class _StepFailed(Exception):
    """The engine gave up on a step."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


class _Search:
    """A run with its search. `task` None: the run is parked."""

    def __init__(self, run: Run, choices: list[ChoiceRun], beams: BeamSearch, started_s: float) -> None:
        self.run = run
        self.choices = choices
        self.beams = beams
        self.started_s = started_s
        self.cached_tokens: int | None = None
        self.tries = 0  # a step is repeated after a pause, under other ids
        self.task: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        if self.task is not None and self.task is not asyncio.current_task():
            self.task.cancel()
        self.task = None

    def sequence(self, index: int, beam: Beam) -> Sequence:
        """Build the engine's sequence that reports the candidates for the token after a beam."""
        choice, sampling = self.choices[0], self.choices[0].generation.sampling
        return msgspec.structs.replace(
            choice.sequence(),
            id=f"{choice.id}-{self.tries}.{self.beams.steps}.{index}",
            token_ids=choice.prompt + beam.ids,
            sampling=Sampling(temperature=0.0, max_tokens=1, ignore_eos=sampling.ignore_eos),
            logprobs=self.beams.candidates,
        )


_ChoiceRow = tuple[int, list[int], list[Text], list[TokenLogprob] | None, Finish]


async def _rows(search: _Search) -> list[_ChoiceRow]:
    """Return the one row of every choice. Texts are made in time slices. Raises AnswerUnreadable."""
    loop, rows = asyncio.get_running_loop(), list[_ChoiceRow]()
    until = loop.time() + SLICE_S
    for choice, beam in zip(search.choices, search.beams.best(), strict=True):
        texts: list[Text] = []
        for token in beam.ids:
            texts.append(choice.pipeline.last(token, hidden=True) if token == beam.end else choice.pipeline.push(token))
            if loop.time() >= until:
                await asyncio.sleep(0)
                until = loop.time() + SLICE_S
        tail = choice.pipeline.finish()
        reason, reasoning_tokens = choice.verdict("length" if beam.end is None else "stop")
        fin = Finish(
            reason=reason,
            stop=beam.end,
            tail=tail,
            prompt_tokens=choice.prompt_tokens,
            completion_tokens=len(beam.ids),
            cached_tokens=min(search.cached_tokens or 0, choice.prompt_tokens),
            reasoning_tokens=reasoning_tokens,
        )
        metrics.PROMPT_TOKENS.inc(choice.prompt_tokens)
        metrics.COMPLETION_TOKENS.inc(len(beam.ids))
        rows.append((choice.choice, beam.ids, texts, beam.logprobs if choice.generation.logprobs is not None else None, fin))
    return rows
