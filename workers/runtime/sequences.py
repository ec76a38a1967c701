"""Submits the choices of runs to the engine, and withdraws them before their end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from headrace.broker.protocol.run import Run
from headrace.jetstream.tasks import TaskScope
from headrace.workers.capability_check import refuse_undeclared
from headrace.workers.engine import Engine, Fault, Handover
from headrace.workers.errors import EngineDead, WorkerError
from headrace.workers.runtime.choice import ChoiceRun
from headrace.workers.runtime.engine_commands import EngineCommands
from headrace.workers.runtime.media_embeddings import Embeddings, MediaOrigin, with_embeddings
from headrace.workers.runtime.watchdog import Watchdog


class Sequences:
    """Implements `headrace.workers.handover.decode_side.HandoverEngines`."""

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
        self.unsubmitted_by[choice.run.rank or 0] += choice.uncached
        self._commands.put(partial(self._submit_here, choice))

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

    def end(self, choice: ChoiceRun) -> None:
        """Forget a choice whose sequence has ended, was refused, or was taken back before its first token."""
        self._drop(choice)

    def _drop(self, choice: ChoiceRun) -> bool:
        """Forget an active choice. False if it is not active."""
        if self.active.get(choice.id) is not choice:
            return False
        del self.active[choice.id]
        mine = self._by_run[choice.run]
        mine.remove(choice)
        if not mine:
            del self._by_run[choice.run]
        return True

    async def _submit_here(self, choice: ChoiceRun) -> None:
        self.unsubmitted_by[choice.run.rank or 0] -= choice.uncached
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
        self._drop(choice)
        if choice.first_token is not None and not choice.first_token.done():
            choice.first_token.set_result(fault)

    def abort(self, *choices: ChoiceRun) -> None:
        """Have the engine stop these choices. Outputs until then still count while the choices are in `active`."""
        self._commands.put(partial(self._engine.abort, [choice.id for choice in choices]))

    def take_back(self, choice: ChoiceRun, params: Mapping[str, Any] | None) -> None:
        """Abort a choice in the engine, and release the blocks that `params` name."""
        if self._drop(choice):
            self.abort(choice)
        if params is not None:
            self._commands.put(partial(self._engine.release, choice.id, params))

    def of(self, run: Run) -> list[ChoiceRun]:
        """Return the choices of a run that the engine works on."""
        return list(self._by_run.get(run, ()))

    def withdraw(self, run: Run) -> list[ChoiceRun]:
        """Abort a run in the engine. Returns its choices that were in the engine."""
        mine = self.of(run)
        for choice in mine:
            self._drop(choice)
        if mine:
            self.abort(*mine)
        return mine
