"""The simulated engine without a clock: continuous batching over paged blocks, one step at a time.

A step first gives every decoding sequence one token, then spends what is left of its token budget on prompts, in parts where
they are long: first those already begun, then new ones as long as there are slots and blocks.  When a running sequence finds
no block, the last that came (or has the worst priority) loses all of its blocks and starts over later: preemption by recompute.

Sans-io: `step()` says what a step did and how long it takes; who calls it decides what "long" means (`engine.py`: real time,
`offline.py`: virtual time).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from workers.engine import Fault, KvEvent, Load, Output, Sequence
from workers.errors import EngineOverloaded, RequestInvalid
from workers.sim.blocks import BlockManager
from workers.sim.faults import SequenceFaults
from workers.sim.run import Phase, Run
from workers.sim.settings import SimSettings
from workers.sim.tokens import Vocabulary


@dataclass(slots=True)
class StepResult:
    """What one step did. With `crash` or `died` set, nothing of it may reach anybody."""

    duration_s: float = 0.0
    outputs: list[Output] = field(default_factory=list)
    events: list[KvEvent] = field(default_factory=list)
    prefill_tokens: int = 0
    decoded: int = 0  # sequences that decoded
    crash: bool = False  # the process is to kill itself
    died: str | None = None  # why the engine is dead


class Scheduler:
    """All sequences of one engine."""

    def __init__(self, settings: SimSettings, vocabulary: Vocabulary) -> None:
        self.settings = settings
        self.manager = BlockManager(settings.blocks, settings.block_size)
        self._vocabulary = vocabulary
        self._timing = settings.timing_model()
        self._runs: dict[str, Run] = {}
        self._waiting: list[tuple[tuple[int, int], Run]] = []  # a heap by rank; entries of aborted runs are skipped
        self._waiting_count = 0
        self._prefilling: list[Run] = []
        self._decoding: list[Run] = []
        self._stuck: list[Run] = []
        self._number = 0
        self._queued_tokens = 0  # of waiting and prefilling sequences
        self._steps = 0
        self._last_step_s = 0.0
        self.preemptions = 0

    # -- from outside ----------------------------------------------------------------------------------------

    def submit(self, sequence: Sequence, faults: SequenceFaults) -> None:
        """Queue a sequence. Raises RequestInvalid (naming the parameter) or EngineOverloaded."""
        length, limit = len(sequence.token_ids), self.settings.context_length
        if sequence.id in self._runs:
            raise RequestInvalid(f"a sequence with id {sequence.id!r} is running", param="id")
        if not 0 < sequence.prompt_tokens <= length:
            raise RequestInvalid(f"prompt_tokens={sequence.prompt_tokens} of {length} token ids", param="prompt_tokens")
        if length >= limit:
            raise RequestInvalid(f"{length} tokens leave no room for an answer in a context of {limit}", param="token_ids")
        if sequence.sampling.max_tokens is not None and sequence.sampling.max_tokens < 1:
            raise RequestInvalid(f"max_tokens={sequence.sampling.max_tokens} is below 1", param="max_tokens")
        if self._waiting_count >= self.settings.waiting:
            raise EngineOverloaded(f"{self._waiting_count} sequences are waiting already")
        self._number += 1
        run = Run(sequence, faults, settings=self.settings, vocabulary=self._vocabulary, number=self._number)
        self._runs[run.id] = run
        self._wait(run)

    def abort(self, ids: Iterable[str]) -> None:
        """Drop these sequences and free their blocks. Unknown ids are fine."""
        for run in [self._runs[i] for i in set(ids) if i in self._runs]:
            self._drop(run)

    def load(self) -> Load:
        return Load(
            running=self._running,
            waiting=self._waiting_count,
            blocks_used=self.manager.used,
            blocks_total=self.settings.blocks,
            queued_prefill_tokens=self._queued_tokens,
            step_s=self._last_step_s,
        )

    # -- one step --------------------------------------------------------------------------------------------

    def step(self) -> StepResult | None:
        """Run one step; None when there is nothing that could be done."""
        self._grow_decoding()
        decoding = self._decoding
        budget = self.settings.step_tokens - len(decoding)
        prefilled = self._continue_prompts(budget)
        prefilled += self._begin_prompts(budget - prefilled)
        if not decoding and not prefilled:
            return None
        result = StepResult(prefill_tokens=prefilled, decoded=len(decoding))
        faults = self.settings.faults
        if faults.die_at_step is not None and self._steps >= faults.die_at_step:
            result.died = f"injected fault: dead at step {faults.die_at_step}"
            return result
        self._steps += 1
        context = sum([len(run.ids) for run in decoding]) if self._timing.decode_per_context_token_s else 0
        result.duration_s = self._last_step_s = faults.slow * self._timing.step_s(
            prefill_tokens=prefilled, sequences=len(decoding), context_tokens=context
        )
        ready = [run for run in self._prefilling if run.computed == len(run.ids)]
        self._decode(result)
        for run in ready:
            self._prefilling.remove(run)
            run.phase = Phase.DECODE
            self._decoding.append(run)
            self._emit(run, result)
        result.events = self.manager.take_events()
        return result

    def _grow_decoding(self) -> None:
        """Blocks for the decoding sequences whose last one is full."""
        for run in [run for run in self._decoding if len(run.ids) > run.capacity]:
            if run.phase is Phase.DECODE:  # not preempted by one before it
                self._commit(run, run.capacity)
                self._make_room(run, 1)

    def _continue_prompts(self, budget: int) -> int:
        """Spend the budget on prompts that are part done; the number of tokens computed."""
        left = budget
        for run in list(self._prefilling):  # one at most: the next is begun only with what the one before it left over
            left -= self._advance(run, left)
        return budget - left

    def _begin_prompts(self, budget: int) -> int:
        """Spend the budget on waiting prompts, as far as slots and blocks reach; the number of tokens computed."""
        left = budget
        while left and self._running < self.settings.slots:
            run = self._next_waiting()
            if run is None or not self._admit(run, left):
                break
            left -= self._advance(run, left)
        return budget - left

    def _admit(self, run: Run, budget: int) -> bool:
        """Move the first waiting sequence into the batch if its first part finds blocks."""
        size = self.settings.block_size
        blocks = self.manager.take_prefix(run.chain()[: (len(run.ids) - 1) // size])  # at least one token is computed
        cached = len(blocks) * size
        part = min(budget, len(run.ids) - cached)
        if -(-(cached + part) // size) - len(blocks) > self.manager.available:
            self.manager.release(blocks)
            return False
        heapq.heappop(self._waiting)
        self._waiting_count -= 1
        run.blocks, run.capacity, run.committed = blocks, cached, cached
        run.computed = cached
        self._queued_tokens -= cached
        if run.cached_tokens is None:
            run.cached_tokens = cached
        run.phase = Phase.PREFILL
        self._prefilling.append(run)
        return True

    def _advance(self, run: Run, budget: int) -> int:
        """Compute the next part of a prompt; its length, 0 if there were no blocks."""
        part = min(budget, len(run.ids) - run.computed)
        missing = -(-(run.computed + part - run.capacity) // self.settings.block_size)
        if missing > 0 and not self._make_room(run, missing):
            return 0
        run.computed += part
        self._queued_tokens -= part
        self._commit(run, run.computed)
        return part

    def _decode(self, result: StepResult) -> None:
        special = []
        append = result.outputs.append
        for run in self._decoding:
            index = run.index
            if index >= run.special_at:
                special.append(run)
                continue
            token = run.stream[index]
            run.index = index + 1
            run.ids.append(token)
            append(Output(run.id, [token]))
        for run in special:
            self._emit(run, result)

    def _emit(self, run: Run, result: StepResult) -> None:
        """The next token of one sequence, with everything that can happen at a token."""
        faults = run.faults
        if run.fault_at is not None and run.index >= run.fault_at:
            if faults.crash_at_token is not None and run.index >= faults.crash_at_token:
                result.crash = True
            elif faults.stuck_at_token is not None and run.index >= faults.stuck_at_token:
                self._decoding.remove(run)
                run.phase = Phase.STUCK
                self._stuck.append(run)
            else:
                fault = Fault(faults.fault_code, f"injected fault at token {run.index}", faults.fault_retriable)
                result.outputs.append(Output(run.id, [], fault=fault))
                self._drop(run)
            return
        output = run.emit()
        result.outputs.append(output)
        if output.finish is not None:
            self._commit(run, len(run.ids) - 1)  # the last token was never computed
            self._drop(run)

    # -- blocks ----------------------------------------------------------------------------------------------

    def _make_room(self, run: Run, count: int) -> bool:
        """Give a running sequence more blocks, taking them from worse ones; False if it was itself the worst."""
        while (blocks := self.manager.allocate(count)) is None:
            victim = max((*self._prefilling, *self._decoding), key=_rank)
            self._preempt(victim)
            if victim is run:
                return False
        run.blocks += blocks
        run.capacity += count * self.settings.block_size
        return True

    def _preempt(self, run: Run) -> None:
        self.preemptions += 1
        self._queued_tokens -= self._remaining(run)
        self._leave(run)
        run.computed = 0
        self._wait(run)

    def _commit(self, run: Run, computed: int) -> None:
        """Make the blocks that are full after `computed` tokens available to others."""
        size = self.settings.block_size
        start, end = run.committed // size, computed // size
        if end <= start:
            return
        chain = run.chain()
        self.manager.commit(
            run.blocks[start:end],
            chain[start:end],
            run.ids[start * size : end * size],
            parent=chain[start - 1] if start else None,
            adapter=run.adapter,
            salt=run.salt,
        )
        run.committed = end * size

    # -- where a sequence is ---------------------------------------------------------------------------------

    @property
    def _running(self) -> int:
        return len(self._prefilling) + len(self._decoding) + len(self._stuck)

    def _wait(self, run: Run) -> None:
        run.phase = Phase.WAITING
        heapq.heappush(self._waiting, (run.rank, run))
        self._waiting_count += 1
        self._queued_tokens += len(run.ids)

    def _next_waiting(self) -> Run | None:
        while self._waiting:
            run = self._waiting[0][1]
            if run.phase is Phase.WAITING:
                return run
            heapq.heappop(self._waiting)
        return None

    def _remaining(self, run: Run) -> int:
        """Tokens of this sequence that count as queued."""
        return len(run.ids) - run.computed if run.phase in (Phase.WAITING, Phase.PREFILL) else 0

    def _leave(self, run: Run) -> None:
        """Take a sequence out of the batch and let go of its blocks."""
        match run.phase:
            case Phase.PREFILL:
                self._prefilling.remove(run)
            case Phase.DECODE:
                self._decoding.remove(run)
            case Phase.STUCK:
                self._stuck.remove(run)
        self.manager.release(run.blocks)
        run.blocks, run.capacity, run.committed = [], 0, 0

    def _drop(self, run: Run) -> None:
        self._queued_tokens -= self._remaining(run)
        if run.phase is Phase.WAITING:
            self._waiting_count -= 1
        self._leave(run)
        run.phase = Phase.GONE
        del self._runs[run.id]


def _rank(run: Run) -> tuple[int, int]:
    return run.rank
