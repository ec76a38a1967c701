"""The simulated engine without a clock: continuous batching over paged blocks, one step at a time.

A step first gives every decoding sequence one token, then spends what is left of its token budget on prompts, in parts where
they are long: first those already begun, then new ones as long as there are slots and blocks.  When a running sequence finds
no block, the last that came (or has the worst priority) loses all of its blocks and starts over later: preemption by recompute.
Blocks that come from elsewhere (`transfer/block_loading.py`) or go there (`transfer/prefill_side.py`) do so beside the steps.

Sans-io: `step()` says what a step did and how long it takes; who calls it decides what "long" means (`engine.py`: real time,
`offline.py`: virtual time).  `clock` tells leases and transfers the time; nothing else looks at it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from headrace.workers.engine import Fault, KvEvent, Load, Output, Sequence
from headrace.workers.errors import EngineOverloaded, RequestInvalid
from headrace.workers.sim.blocks import BlockManager
from headrace.workers.sim.fabric import HandoverWire
from headrace.workers.sim.kv_transfer import SimKvTransfer
from headrace.workers.sim.run import EngineBatch, Phase, SequenceRun
from headrace.workers.sim.settings import SequenceFaults, SimSettings
from headrace.workers.sim.tokens import Speller, Vocabulary


@dataclass(slots=True)
class StepResult:
    """The outcome of one step. With `crash` or `died` set, its outputs and events must not be published."""

    duration_s: float = 0.0
    outputs: list[Output] = field(default_factory=list)
    events: list[KvEvent] = field(default_factory=list)
    prefill_tokens: int = 0
    decoded: int = 0  # sequences that decoded
    crash: bool = False  # the process is to kill itself
    died: str | None = None  # why the engine is dead
    blamed: frozenset[str] = frozenset()  # the sequences that it died of


class SimScheduler:
    """The sequences of one engine. Without `wire` it hands nothing over."""

    def __init__(
        self,
        settings: SimSettings,
        vocabulary: Vocabulary,
        *,
        manager: BlockManager | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        wire: HandoverWire | None = None,
    ) -> None:
        self.settings = settings
        self.manager = manager or block_manager(settings)
        self.closed = ""  # why no sequences are taken in
        self.memory_freed = False  # asleep: the memory is freed
        self._vocabulary = vocabulary
        self._timing = settings.timing_model()
        self._clock = clock
        self._batch = EngineBatch(self.manager)
        self.exchange = SimKvTransfer(self._batch, self._timing, clock=clock, wire=wire)
        self._number = 0
        self._steps = 0
        self._last = StepResult()

    # -- from outside ----------------------------------------------------------------------------------------

    def submit(self, sequence: Sequence, faults: SequenceFaults) -> None:
        """Queue a sequence. Raises RequestInvalid (naming the parameter), EngineOverloaded or UnsupportedByEngine."""
        length, limit = len(sequence.token_ids), self.settings.context_length
        if sequence.id in self._batch.runs:
            raise RequestInvalid(f"a sequence with id {sequence.id!r} is running", param="id")
        if not 0 < sequence.prompt_tokens <= length:
            raise RequestInvalid(f"prompt_tokens={sequence.prompt_tokens} of {length} token ids", param="prompt_tokens")
        if length >= limit:
            raise RequestInvalid(f"{length} tokens leave no room for an answer in a context of {limit}", param="token_ids")
        if sequence.sampling.max_tokens is not None and sequence.sampling.max_tokens < 1:
            raise RequestInvalid(f"max_tokens={sequence.sampling.max_tokens} is below 1", param="max_tokens")
        if self.closed:
            raise EngineOverloaded(self.closed)
        if self._batch.waiting.count >= self.settings.waiting:
            raise EngineOverloaded(f"{self._batch.waiting.count} sequences are waiting already")
        self._number += 1
        run = SequenceRun(sequence, faults, settings=self.settings, vocabulary=self._vocabulary, number=self._number)
        if sequence.handover is not None:
            self.exchange.enter(run, sequence.handover, sequence)
        self._batch.runs[run.id] = run
        self._batch.wait(run)

    def abort(self, ids: Iterable[str]) -> None:
        """Drop these sequences and free their blocks, those on offer included. Unknown ids are fine."""
        for name in set(ids):
            if name in self._batch.runs:
                self._drop(self._batch.runs[name])
            else:
                self.exchange.release(name, "the prefill side was aborted")

    def release(self, name: str, why: str) -> bool:
        """Release the blocks that this sequence offers, or its wait in a room. Returns true if there was anything."""
        run = self._batch.runs.get(name)
        if run is not None and run.side is not None and (side := run.side.then or run.side).kind == "prefill":
            name = side.key
        return self.exchange.release(name, why)

    @property
    def speller(self) -> Speller:
        return self._vocabulary.speller

    @property
    def preemptions(self) -> int:
        return self._batch.preemptions

    @property
    def ids(self) -> list[str]:
        return list(self._batch.runs)

    @property
    def idle(self) -> bool:
        """True when no sequence is inside and no blocks are on offer."""
        prefill_side = self.exchange.prefill_side
        return not self._batch.runs and not (prefill_side is not None and prefill_side.holding)

    def stats(self) -> dict[str, Any]:
        """Return counters, for tests and diagnosis."""
        return {"preemptions": self.preemptions, "cached_blocks": self.manager.cached} | self.exchange.stats()

    def next_at(self) -> float | None:
        """Return the time at which `step` has work again after it returned None, if nothing comes from outside."""
        return self.exchange.next_at()

    def load(self, left_s: float = 0.0) -> Load:
        """Report the load. `left_s`: seconds of the last step still to come; what it computes in them counts as queued."""
        last = self._last
        left = min(max(left_s / last.duration_s, 0.0), 1.0) if last.duration_s else 0.0
        return Load(
            running=self._batch.running,
            waiting=self._batch.waiting.count,
            blocks_used=self.manager.used,
            blocks_total=0 if self.memory_freed else self.settings.blocks,
            queued_prefill_tokens=self._batch.queued_tokens + round(left * last.prefill_tokens),
            step_s=last.duration_s,
            step_prefill_tokens=last.prefill_tokens,
            step_decodes=last.decoded,
        )

    # -- one step --------------------------------------------------------------------------------------------

    def step(self) -> StepResult | None:
        """Run one step. Returns None when there is nothing to do."""
        silent_from = self.settings.faults.silent_from_step
        if silent_from is not None and self._steps >= silent_from:
            return None
        early = [] if self.exchange.none else self.exchange.settle(self._drop)
        batch = self._batch
        decoding = batch.decoding
        self._grow_decoding()
        budget = self.settings.step_tokens - len(decoding)
        prefilled = self._continue_prompts(budget) if batch.prefilling else 0
        if batch.waiting.count:
            prefilled += self._begin_prompts(budget - prefilled)
        if not decoding and not prefilled:
            return StepResult(outputs=early, events=self.manager.take_events()) if early else None
        decoded = len(decoding)
        result = StepResult(prefill_tokens=prefilled, decoded=decoded, outputs=early)
        faults = self.settings.faults
        if faults.die_at_step is not None and self._steps >= faults.die_at_step:
            result.died = f"injected fault: dead at step {faults.die_at_step}"
            return result
        self._steps += 1
        context = sum([len(run.ids) for run in decoding]) if self._timing.decode_per_context_token_s else 0
        result.duration_s = faults.slow * self._timing.step_s(
            prefill_tokens=prefilled, sequences=decoded, context_tokens=context
        )
        self._last = result
        ready = [run for run in batch.prefilling if run.computed == len(run.ids)] if prefilled else ()
        self._decode(result)
        for run in ready:
            batch.prefilling.remove(run)
            run.phase = Phase.DECODE
            decoding.append(run)
            self._emit(run, result)
        result.events = self.manager.take_events()
        return result

    def _grow_decoding(self) -> None:
        """Give a block to each decoding sequence whose last one is full."""
        for run in [run for run in self._batch.decoding if run.prompt_tokens + run.index > run.capacity]:
            if run.phase is Phase.DECODE:  # not preempted by a sequence before it
                self._batch.commit(run, run.capacity)
                self._batch.make_room(run, 1)

    def _continue_prompts(self, budget: int) -> int:
        """Spend the budget on prompts that are partly computed. Returns the number of tokens computed."""
        left = budget
        for run in list(self._batch.prefilling):  # usually one: the next prompt begins only with budget left over
            if run.phase is Phase.PREFILL:  # not preempted by a sequence before it
                left -= self._advance(run, left)
        return budget - left

    def _begin_prompts(self, budget: int) -> int:
        """Spend the budget on waiting prompts, as far as slots and blocks reach. Returns the number of tokens computed."""
        left = budget
        while left and self._batch.waiting.count and self._batch.running < self.settings.slots:
            run = self._batch.waiting.first()
            if run is None or not self._admit(run, left):
                break
            if run.phase is Phase.PREFILL:
                left -= self._advance(run, left)
        return budget - left

    def _admit(self, run: SequenceRun, budget: int) -> bool:
        """Move the first waiting sequence into the batch if its first part finds blocks."""
        size = self.settings.block_size
        blocks = self.manager.take_prefix(run.chain()[: (len(run.ids) - 1) // size])  # at least one token is computed
        cached = len(blocks) * size
        loader = self.exchange.loader
        if loader is not None and (load := loader.plan(run, len(blocks))) is not None:
            return self.exchange.begin(run, load, blocks)
        part = min(budget, len(run.ids) - cached)
        if -(-(cached + part) // size) - len(blocks) > self.manager.available:
            self.manager.release(blocks)
            return False
        self._batch.start(run, blocks)
        if run.cached_tokens is None:
            run.cached_tokens = cached
            if loader is not None:
                run.extra = {"cached": {"device": cached}}
        self._batch.prefill(run)
        return True

    def _advance(self, run: SequenceRun, budget: int) -> int:
        """Compute the next part of a prompt. Returns its length, 0 if there were no blocks."""
        part = min(budget, len(run.ids) - run.computed)
        missing = -(-(run.computed + part - run.capacity) // self.settings.block_size)
        if missing > 0 and not self._batch.make_room(run, missing):
            return 0
        self._batch.reach(run, run.computed + part)
        return part

    def _decode(self, result: StepResult) -> None:
        special = []
        outputs = result.outputs
        for run in self._batch.decoding:
            index = run.index
            if index >= run.special_at:
                special.append(run)
                continue
            token = [run.stream[index]]
            run.index = index + 1
            run.ids += token
            outputs += (Output(run.id, token),)
        for run in special:
            self._emit(run, result)

    def _emit(self, run: SequenceRun, result: StepResult) -> None:
        """Emit the next token of one sequence, with everything that can happen at a token."""
        faults = run.faults
        if run.index >= run.fault_at:
            if faults.crash_at_token is not None and run.index >= faults.crash_at_token:
                result.crash = True
            elif faults.die_at_token is not None and run.index >= faults.die_at_token:
                result.died = f"injected fault: dead of {run.id} at token {run.index}"
                result.blamed |= {run.id}
            elif faults.stuck_at_token is not None and run.index >= faults.stuck_at_token:
                self._batch.decoding.remove(run)
                run.phase = Phase.STUCK
                self._batch.stuck.append(run)
            else:
                fault = Fault(faults.fault_code, f"injected fault at token {run.index}", faults.fault_retriable)
                result.outputs.append(Output(run.id, [], fault=fault))
                self._drop(run)
            return
        output = run.emit()
        result.outputs.append(output)
        if output.finish is not None:
            self._batch.commit(run, len(run.ids) - 1)  # the last token was never computed
            if run.side is not None and self.exchange.hand_over(run, output, self._clock() + result.duration_s):
                result.outputs.pop()
            else:
                self._drop(run)

    def _drop(self, run: SequenceRun) -> None:
        if not self.exchange.none:
            self.exchange.leave(run)
        self._batch.drop(run)


def block_manager(settings: SimSettings) -> BlockManager:
    return BlockManager(
        settings.blocks, settings.block_size, host_blocks=settings.host_blocks, disk_blocks=settings.disk_blocks
    )
