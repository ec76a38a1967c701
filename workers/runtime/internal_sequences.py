"""Runs engine sequences that are no choices: canaries, prefills for other workers and peer warm-ups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from headrace.jetstream.tasks import TaskScope
from headrace.workers.engine import Engine, Fault, Output, Sequence
from headrace.workers.errors import EngineDead, RequestInvalid, UnsupportedByEngine, WorkerError
from headrace.workers.runtime.choice import ChoiceRun
from headrace.workers.runtime.engine_commands import EngineCommands
from headrace.workers.runtime.media_embeddings import Embeddings, MediaOrigin, with_embeddings
from headrace.workers.runtime.watchdog import Watchdog


class RawSubmissions:
    """Implements `headrace.workers.handover.prefill_side.RawSequences`. The length is the number of sequences in the engine."""

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
