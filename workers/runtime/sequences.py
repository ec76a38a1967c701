"""Submits the choices of runs to the engine, and withdraws them before their end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import msgspec
import structlog

from headrace.broker.messages.requests import Spill
from headrace.broker.protocol.run import Run
from headrace.jetstream.tasks import TaskScope
from headrace.workers.engine import Engine, Fault, Handover, Output, Sequence
from headrace.workers.errors import EngineDead, RequestInvalid, UnsupportedByEngine, WorkerError
from headrace.workers.kit import refuse_undeclared
from headrace.workers.runtime.choice import ChoiceRun
from headrace.workers.runtime.watchdog import Watchdog

log = structlog.get_logger()

Command = Callable[[], Awaitable[None]]


class EngineCommands:
    """A queue of submissions and aborts, so that an abort never overtakes its submission. Bounded by the slots."""

    def __init__(self, dead: Callable[[str], None]) -> None:
        """`dead` is called with the reason when the engine is dead."""
        self._queue: asyncio.Queue[Command] = asyncio.Queue()
        self._dead = dead

    def put(self, command: Command) -> None:
        """Queue a command. Its errors are only logged, except for the engine's death."""
        self._queue.put_nowait(command)

    async def run(self) -> None:
        while True:
            command = await self._queue.get()
            try:
                await command()
            except EngineDead as error:
                self._dead(str(error))
            except WorkerError as error:
                log.warning("engine.command_failed", error=str(error))


@dataclass(frozen=True, slots=True)
class MediaOrigin:
    """The request that media belong to, and the place of its payload if that is in the store of large payloads."""

    request_id: str
    spill: Spill | None = None


class Embeddings(Protocol):
    """Gets embeddings of media from elsewhere (`headrace.workers.encoding.source.EmbeddingSource`)."""

    async def fetch(self, sequence: Sequence, origin: MediaOrigin) -> Mapping[int, bytes]:
        """Return the available embeddings by the index of the item.

        Those of items in the part of the prompt that should be cached are not fetched.
        """


async def with_embeddings(embeddings: Embeddings | None, sequence: Sequence, origin: MediaOrigin) -> Sequence:
    """Return the sequence with the embeddings of its media that could be had; the engine encodes the others.

    The decode side of a hand-over fetches the blocks of its prompt and needs none.
    """
    fetches_blocks = sequence.handover is not None and sequence.handover.kind == "decode"
    if embeddings is None or not sequence.media or fetches_blocks:
        return sequence
    found = await embeddings.fetch(sequence, origin)
    return msgspec.structs.replace(sequence, embeddings=found) if found else sequence


class RawSubmissions:
    """Sequences that belong to no run of this worker, which reach the engine in the order of the calls.

    The length is the number of those in the engine.
    """

    def __init__(
        self,
        engine: Engine,
        commands: EngineCommands,
        watchdog: Watchdog,
        scope: TaskScope,
        *,
        active: Mapping[str, ChoiceRun],
    ) -> None:
        """`active`: the engine's sequences with a run. `scope` is open while the runtime runs."""
        self._engine = engine
        self._commands = commands
        self._watchdog = watchdog
        self._scope = scope
        self._active = active
        self.embeddings: Embeddings | None = None  # without it the engine encodes all media
        self._takers: dict[str, Callable[[Output], None]] = {}

    def __len__(self) -> int:
        return len(self._takers)

    def submit_raw(self, sequence: Sequence, on_output: Callable[[Output], None], origin: MediaOrigin | None = None) -> None:
        """Submit a sequence. All outputs go to `on_output`, one with a fault if the engine refuses the sequence.

        With `origin` embeddings of its media are fetched from other workers.
        """
        if not self._takers and not self._active:
            self._watchdog.begin()
        self._takers[sequence.id] = on_output
        self._commands.put(partial(self._submit_or_read, sequence, origin))

    async def _submit_or_read(self, sequence: Sequence, origin: MediaOrigin | None) -> None:
        if sequence.media:  # The engine takes a while to read these, and other commands need not wait.
            self._scope.spawn(self._submit_aside(sequence, origin))
        else:
            await self._submit(sequence)

    async def _submit_aside(self, sequence: Sequence, origin: MediaOrigin | None) -> None:
        if origin is not None:
            sequence = await with_embeddings(self.embeddings, sequence, origin)
        try:
            await self._submit(sequence)
        except EngineDead as error:
            self._watchdog.declare_dead(str(error))

    async def _submit(self, sequence: Sequence) -> None:
        if sequence.id not in self._takers:
            return
        try:
            await self._engine.submit(sequence)
        except EngineDead:
            raise
        except WorkerError as error:
            code = "invalid_request" if isinstance(error, (RequestInvalid, UnsupportedByEngine)) else "engine_error"
            self.on_output(Output(sequence.id, [], fault=Fault(code, str(error), error.retriable)))

    def abort_raw(self, sequence_id: str) -> None:
        """Abort a sequence and release the blocks that it offers. No further output reaches its callback."""
        if self._takers.pop(sequence_id, None) is not None:
            self._commands.put(partial(self._engine.abort, [sequence_id]))
        self._commands.put(partial(self._engine.release, sequence_id, None))

    def on_output(self, output: Output) -> None:
        """Pass an output to the callback of its sequence. Outputs of unknown sequences are dropped."""
        taker = self._takers.get(output.id)
        if taker is None:
            return
        if output.finish is not None or output.fault is not None:
            del self._takers[output.id]
        taker(output)


class Sequences:
    """The engine's sequences of runs, from their submission to their end."""

    def __init__(
        self,
        engine: Engine,
        commands: EngineCommands,
        watchdog: Watchdog,
        scope: TaskScope,
        *,
        refused: Callable[[Run, WorkerError], None],
    ) -> None:
        """`refused` is called if the engine refuses a sequence of a run. `scope` is open while the runtime runs."""
        self._engine = engine
        self._commands = commands
        self._watchdog = watchdog
        self._refused = refused
        self.scope = scope
        self.embeddings: Embeddings | None = None  # without it the engine encodes all media
        self.active: dict[str, ChoiceRun] = {}
        self._by_run: dict[Run, list[ChoiceRun]] = {}  # of `active`
        self.unsubmitted_by: Counter[int] = Counter()  # tokens to be computed of the sequences still in `commands`, by rank

    @property
    def unsubmitted(self) -> int:
        """Return the tokens to be computed of the sequences that the engine has not got yet."""
        return sum(self.unsubmitted_by.values())

    # -- into the engine ---------------------------------------------------------------------------------------

    def begin_here(self, choice: ChoiceRun) -> None:
        """Have this engine compute the prompt of a choice."""
        self._activate(choice)
        tokens = choice.uncached
        self.unsubmitted_by[choice.run.rank or 0] += tokens
        self._commands.put(partial(self._submit_here, choice, tokens))

    def hand_over(self, choice: ChoiceRun, handover: Handover) -> asyncio.Future[Fault | None]:
        """Give a choice to the engine. The result is None at its first token, or the fault `transfer_failed`."""
        choice.first_token = asyncio.get_running_loop().create_future()
        self._activate(choice)
        self._commands.put(partial(self._submit_or_read, choice, choice.id, handover))
        return choice.first_token

    def _activate(self, choice: ChoiceRun) -> None:
        if not self.active:
            self._watchdog.begin()
        self.active[choice.id] = choice
        self._by_run.setdefault(choice.run, []).append(choice)

    def end(self, choice: ChoiceRun) -> bool:
        """Forget a choice that the engine has ended. Returns False if it is not in the engine."""
        if self.active.get(choice.id) is not choice:
            return False
        del self.active[choice.id]
        mine = self._by_run[choice.run]
        mine.remove(choice)
        if not mine:
            del self._by_run[choice.run]
        return True

    async def _submit_here(self, choice: ChoiceRun, tokens: int) -> None:
        self.unsubmitted_by[choice.run.rank or 0] -= tokens
        await self._submit_or_read(choice, choice.id, None)

    async def _submit_or_read(self, choice: ChoiceRun, sequence_id: str, handover: Handover | None) -> None:
        if choice.generation.media or choice.prompt_embeds is not None:
            # The engine takes a while to read these. Other commands need not wait, and an abort may come in between.
            self.scope.spawn(self._submit_aside(choice, sequence_id, handover))
        else:
            await self._submit(choice, sequence_id, handover)

    async def _submit_aside(self, choice: ChoiceRun, sequence_id: str, handover: Handover | None) -> None:
        try:
            await self._submit(choice, sequence_id, handover)
        except EngineDead as error:
            self._watchdog.declare_dead(str(error))

    async def _submit(self, choice: ChoiceRun, sequence_id: str, handover: Handover | None) -> None:
        if self.active.get(sequence_id) is not choice:
            return  # The choice was taken back meanwhile.
        run = choice.run
        try:
            sequence = choice.sequence(handover)
            if sequence.media:
                sequence = await with_embeddings(self.embeddings, sequence, MediaOrigin(run.id, run.envelope.spill))
                if self.active.get(sequence_id) is not choice:
                    return
            refuse_undeclared(self._engine.capabilities, sequence)
            await self._engine.submit(sequence)
        except EngineDead:
            raise
        except WorkerError as error:
            if handover is not None:  # The hand-over is wrong, not the request, so this engine can compute the prompt.
                self.fail_handover(choice, Fault("transfer_failed", str(error), retriable=True))
            else:
                self._refused(run, error)

    # -- out of the engine -------------------------------------------------------------------------------------

    def fail_handover(self, choice: ChoiceRun, fault: Fault) -> None:
        """Resolve the hand-over of a choice with a fault: the engine has dropped the choice."""
        self.end(choice)
        if choice.first_token is not None and not choice.first_token.done():
            choice.first_token.set_result(fault)

    def abort(self, *choices: ChoiceRun) -> None:
        self._commands.put(partial(self._engine.abort, [choice.id for choice in choices]))

    def take_back(self, choice: ChoiceRun, params: Mapping[str, Any] | None) -> None:
        """Abort a choice in the engine, and release the blocks that `params` name."""
        if self.end(choice):
            self.abort(choice)
        if params is not None:
            self._commands.put(partial(self._engine.release, choice.id, params))

    def of(self, run: Run) -> list[ChoiceRun]:
        return list(self._by_run.get(run, ()))

    def withdraw(self, run: Run) -> list[ChoiceRun]:
        """Abort a run in the engine. Returns its choices that were in the engine."""
        mine = self.of(run)
        for choice in mine:
            self.end(choice)
        if mine:
            self.abort(*mine)
        return mine
