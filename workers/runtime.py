"""The worker runtime: between the job protocol above and one engine below.

It turns a claimed job into engine sequences (one per open choice), runs their tokens through the text pipeline, and reports
every engine step to the session as one batch.  It knows the engine only by its protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container

import msgspec
import structlog

from broker.codec import decode, unpack_u32, unpack_u64
from broker.errors import WireError
from broker.messages import Finish, FinishReason, Generation, JobFault, LoadReport
from broker.protocol.runs import Run
from broker.worker import WorkerSession
from workers import metrics
from workers.engine import Engine, EngineInfo, Output, Sequence
from workers.errors import EngineDead, EngineError, EngineOverloaded, RequestInvalid, UnsupportedByEngine
from workers.resume import cannot_resume
from workers.text.pipeline import TextPipeline, TokenTable

log = structlog.get_logger()


class ChoiceRun:
    """One choice of one run, while the engine works on it."""

    __slots__ = (
        "cached_tokens",
        "choice",
        "expected_cached",
        "first_s",
        "generation",
        "id",
        "limit",
        "pipeline",
        "plain",
        "prompt",
        "push",
        "run",
        "started_s",
        "told",
    )

    def __init__(
        self,
        run: Run,
        choice: int,
        generation: Generation,
        prompt: list[int],
        limit: int,
        pipeline: TextPipeline,
        *,
        expected_cached: int = 0,
        told: list[bool],
    ) -> None:
        self.id = f"{run.id}-{run.attempt}-{run.run & 0xFFFF:04x}-{choice}"
        self.run = run
        self.choice = choice
        self.generation = generation
        self.prompt = prompt
        self.limit = limit  # most tokens this choice may have in all
        self.pipeline = pipeline
        self.push = pipeline.push
        self.plain = False  # after the first output, if no stop string is looked for: a token is one text and nothing else
        self.cached_tokens = 0
        self.expected_cached = expected_cached
        self.told = told  # shared by the choices of a run: empty until one of them has its first token
        self.started_s = 0.0
        self.first_s = 0.0

    def sequence(self) -> Sequence:
        """What is left to do, as the engine sees it: emitted tokens are a forced prefix."""
        generation = self.generation
        emitted = self.run.choices[self.choice].ids
        sampling = generation.sampling
        sampling = msgspec.structs.replace(
            sampling,
            max_tokens=self.limit - len(emitted),
            min_tokens=max(0, sampling.min_tokens - len(emitted)),
            seed=None if sampling.seed is None else sampling.seed + self.choice,
        )
        return Sequence(
            id=self.id,
            token_ids=self.prompt + emitted if emitted else self.prompt,
            prompt_tokens=len(self.prompt),
            sampling=sampling,
            logprobs=generation.logprobs,
            prompt_logprobs=generation.prompt_logprobs,
            guided=generation.guided,
            adapter=generation.adapter,
            cache_salt=generation.cache_salt,
            session_id=generation.session_id,
            priority=self.run.envelope.priority,
            media=generation.media,
            expected_cached=self.expected_cached,
            extra=generation.extra,
        )

    @property
    def uncached(self) -> int:
        """Tokens that the engine will have to compute before the first one it gives, as far as can be told."""
        return len(self.prompt) + len(self.run.choices[self.choice].ids) - self.expected_cached


class Runtime:
    """Executes runs on one engine. `attach` the session before the first run."""

    def __init__(self, engine: Engine, *, stall_s: float) -> None:
        self._engine = engine
        self._stall_s = stall_s
        self._session: WorkerSession | None = None
        self._info: EngineInfo | None = None
        self._table: TokenTable | None = None
        self._active: dict[str, ChoiceRun] = {}
        self._parked: dict[Run, list[ChoiceRun]] = {}
        # Submissions and aborts in one queue, so that an abort never overtakes its submission. Bounded by the slots.
        self._commands: asyncio.Queue[tuple[ChoiceRun | None, list[str]]] = asyncio.Queue()
        self._unsubmitted = 0  # tokens to be computed of what is in `_commands`
        self._cache: Callable[[], Container[int]] | None = None
        self._last_step_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._tapped: Callable[[list[Output]], None] | None = None
        self.dead: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def attach(self, session: WorkerSession, info: EngineInfo, table: TokenTable) -> None:
        self._session = session
        self._info = info
        self._table = table

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
            tasks.create_task(self._feed())
            tasks.create_task(self._watch_death())
            tasks.create_task(self._watch_stall())

    async def _feed(self) -> None:
        while True:
            choice, aborted = await self._commands.get()
            if choice is None:
                await self._guard(self._engine.abort(aborted))
                continue
            self._unsubmitted -= choice.uncached
            if choice.id in self._active:
                await self._submit(choice)

    async def _guard(self, call: Awaitable[None]) -> None:
        try:
            await call
        except EngineDead as error:
            self._declare_dead(str(error))
        except EngineError as error:
            log.warning("engine.abort_failed", error=str(error))

    async def _submit(self, choice: ChoiceRun) -> None:
        if self._session is None:
            return
        run = choice.run
        try:
            await self._engine.submit(choice.sequence())
        except EngineDead as error:
            self._declare_dead(str(error))
        except RequestInvalid as error:
            self._session.fail(run, JobFault("invalid_request", str(error), param=error.param))
        except UnsupportedByEngine as error:
            self._session.fail(run, JobFault("invalid_request", str(error)))
        except EngineOverloaded as error:
            self._session.retry_elsewhere(run, JobFault("engine_overloaded", str(error), retriable=True, retry_after_s=1.0))
        except EngineError as error:
            fault = JobFault("engine_error", str(error), retriable=error.retriable)
            if error.retriable:
                self._session.retry_elsewhere(run, fault)
            else:
                self._session.fail(run, fault)

    def _declare_dead(self, why: str) -> None:
        if not self.dead.done():
            self.dead.set_result(why)

    async def _watch_death(self) -> None:
        self._declare_dead(await self._engine.died())

    async def _watch_stall(self) -> None:
        """An engine that has work and says nothing is as dead as one that has exited."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(1.0, self._stall_s / 4))
            if not self._active:
                self._last_step_s = loop.time()
            elif loop.time() - self._last_step_s > self._stall_s:
                metrics.STALLS.inc()
                self._declare_dead(f"no step for {self._stall_s:g} s with {len(self._active)} sequences running")

    # -- Executor --------------------------------------------------------------------------------------------

    def start(self, run: Run, payload: bytes) -> None:
        assert self._session is not None  # attached before the session can start anything  # noqa: S101
        try:
            generation = decode(Generation, payload)
            prompt = unpack_u32(generation.token_ids)
            choices = self._choices(run, generation, prompt)
        except WireError as error:
            self._session.fail(run, JobFault("invalid_request", f"malformed payload: {error}"))
            return
        except RequestInvalid as error:
            self._session.fail(run, JobFault("invalid_request", str(error), param=error.param))
            return
        refusal = cannot_resume(run, generation, self._engine.capabilities)
        if refusal is not None:
            self._session.fail(run, JobFault("resume_impossible", refusal, retriable=True))
            return
        if run.resumed:
            metrics.RESUMED.inc()
        for choice in choices:
            self._begin(choice)
        self._session.flush()

    def _choices(self, run: Run, generation: Generation, prompt: list[int]) -> list[ChoiceRun]:
        assert self._info is not None and self._table is not None  # noqa: S101, PT018
        room = self._info.context_length - len(prompt)
        if not prompt:
            raise RequestInvalid("the prompt is empty", param="prompt")
        if room < 1:
            raise RequestInvalid(
                f"the prompt has {len(prompt)} tokens; the context length is {self._info.context_length}", param="prompt"
            )
        wanted = generation.sampling.max_tokens
        limit = room if wanted is None else min(wanted, room)
        expected = self._expected_cached(run, len(prompt))
        told: list[bool] = []
        choices = []
        for index, log_ in enumerate(run.choices):
            if log_.settled:
                continue
            pipeline = TextPipeline(
                self._table,
                prompt_ids=prompt,
                stop=generation.stop,
                include_stop=generation.include_stop,
                skip_special_tokens=generation.skip_special_tokens,
                min_tokens=generation.sampling.min_tokens,
            )
            for token in log_.ids:  # what the client has been given is replayed in silence
                pipeline.push(token)
            choice = ChoiceRun(run, index, generation, prompt, limit, pipeline, expected_cached=expected, told=told)
            choices.append(choice)
        return choices

    def _expected_cached(self, run: Run, tokens: int) -> int:
        """Tokens of this prompt that the engine should find in its cache; at least one token is always computed."""
        size, envelope = run.envelope.block_size, run.envelope
        if self._cache is None or self._info is None or size != self._info.block_size or not envelope.hashes:
            return 0
        cache = self._cache()
        chain = unpack_u64(envelope.hashes)
        blocks = min(len(chain), (tokens - 1) // size)
        for n in range(blocks):
            if chain[n] not in cache:
                return size * n
        return size * blocks

    def _begin(self, choice: ChoiceRun) -> None:
        emitted = len(choice.run.choices[choice.choice].ids)
        if emitted and choice.pipeline.stopped is not None:
            self._finish(choice, [], [], "stop", choice.pipeline.stopped)
        elif emitted >= choice.limit:
            self._finish(choice, [], [], "length", None)
        else:
            choice.started_s = self._loop.time()
            if not self._active:
                self._last_step_s = choice.started_s
            self._active[choice.id] = choice
            self._unsubmitted += choice.uncached
            self._commands.put_nowait((choice, []))

    def stop(self, run: Run) -> None:
        self._parked.pop(run, None)
        self._withdraw(run)

    def _withdraw(self, run: Run) -> list[ChoiceRun]:
        mine = [choice for choice in self._active.values() if choice.run is run]
        for choice in mine:
            del self._active[choice.id]
        if mine:
            self._commands.put_nowait((None, [choice.id for choice in mine]))
        return mine

    def park(self, run: Run) -> None:
        if run not in self._parked:
            self._parked[run] = self._withdraw(run)
            metrics.PARKED.inc()

    def unpark(self, run: Run) -> None:
        for choice in self._parked.pop(run, ()):
            self._begin(choice)
        if self._session is not None:
            self._session.flush()

    def load(self, report: LoadReport) -> LoadReport:
        load = self._engine.load()
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
        now = self._last_step_s = self._loop.time()
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
                continue
            ids = output.ids
            if choice.plain and len(ids) == 1 and output.finish is None and output.fault is None:  # nearly every output
                append(choice.run, choice.choice, ids, [choice.push(ids[0])], logprobs=output.logprobs)
            else:
                self._on_output(session, choice, output, now)
        session.flush()

    def _on_output(self, session: WorkerSession, choice: ChoiceRun, output: Output, now_s: float) -> None:
        if output.fault is not None:
            del self._active[choice.id]
            fault = JobFault("engine_error", output.fault.message, retriable=output.fault.retriable)
            if output.fault.retriable:
                session.retry_elsewhere(choice.run, fault)
            else:
                session.fail(choice.run, fault)
            return
        if output.cached_tokens is not None:
            choice.cached_tokens = output.cached_tokens
        ids = output.ids
        if not choice.first_s and ids:
            choice.first_s = now_s
            metrics.FIRST_TOKEN_S.observe(now_s - choice.started_s)
            if not choice.told:
                choice.told.append(True)
                computed = len(choice.prompt) + choice.run.choices[choice.choice].start - choice.cached_tokens
                session.prefilled(choice.run, max(0, computed))
        choice.plain = choice.first_s > 0.0 and not choice.generation.stop
        push = choice.push
        finish = output.finish
        texts = []
        for index, token in enumerate(ids):
            if finish == "stop" and index == len(ids) - 1 and not choice.generation.include_stop:
                texts.append("")  # the stop token itself is not part of the answer
                break
            texts.append(push(token))
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

    def _stopped_by_string(self, choice: ChoiceRun, ids: list[int], texts: list[str], output: Output) -> None:
        if output.finish is None:
            self._commands.put_nowait((None, [choice.id]))
        self._finish(choice, ids, texts, "stop", choice.pipeline.stopped, output)

    def _finish(
        self,
        choice: ChoiceRun,
        ids: list[int],
        texts: list[str],
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
        fin = Finish(
            reason=reason,
            stop=stop,
            tail=tail,
            prompt_tokens=len(choice.prompt),
            completion_tokens=completion_tokens,
            cached_tokens=min(choice.cached_tokens, len(choice.prompt)),
        )
        metrics.TOKENS.labels("prompt").inc(len(choice.prompt))
        metrics.TOKENS.labels("completion").inc(completion_tokens)
        self._session.append(run, choice.choice, ids, texts, logprobs=logprobs, fin=fin)
