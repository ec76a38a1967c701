"""Sequences that belong to no run: canaries, prompts computed for other workers, and first meetings with those."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from headrace.workers.engine import Engine, Fault, Output, Sequence
from headrace.workers.errors import EngineDead, WorkerError
from headrace.workers.runtime.choice import ChoiceRun
from headrace.workers.runtime.engine_commands import EngineCommands
from headrace.workers.runtime.watchdog import Watchdog


class RawSubmissions:
    """Implements `headrace.workers.handover.prefill_side.RawSequences`. Its length: how many the engine works on."""

    def __init__(self, engine: Engine, commands: EngineCommands, watchdog: Watchdog, active: Mapping[str, ChoiceRun]) -> None:
        """`active`: what else the engine works on."""
        self._engine = engine
        self._commands = commands
        self._watchdog = watchdog
        self._active = active
        self._takers: dict[str, Callable[[Output], None]] = {}

    def __len__(self) -> int:
        return len(self._takers)

    def submit_raw(self, sequence: Sequence, on_output: Callable[[Output], None]) -> None:
        """All outputs go to `on_output`, one with a fault if the engine does not take it."""
        if not self._takers and not self._active:
            self._watchdog.begin()
        self._takers[sequence.id] = on_output
        self._commands.put(partial(self._submit, sequence))

    async def _submit(self, sequence: Sequence) -> None:
        if sequence.id not in self._takers:
            return
        try:
            await self._engine.submit(sequence)
        except EngineDead:
            raise
        except WorkerError as error:
            self.on_output(Output(sequence.id, [], fault=Fault("engine_error", str(error), error.retriable)))

    def abort_raw(self, sequence_id: str) -> None:
        """Also lets go of what it has on offer. Nothing more of it reaches its taker."""
        if self._takers.pop(sequence_id, None) is not None:
            self._commands.put(partial(self._engine.abort, [sequence_id]))
        self._commands.put(partial(self._engine.release, sequence_id, None))

    def on_output(self, output: Output) -> None:
        """What the engine says of a sequence; nothing happens if it is none of these."""
        taker = self._takers.get(output.id)
        if taker is None:
            return
        if output.finish is not None or output.fault is not None:
            del self._takers[output.id]
        taker(output)
