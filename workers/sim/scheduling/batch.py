"""The running batch: the sequences of an engine by phase, and the blocks they hold."""

from __future__ import annotations

from headrace.workers.sim.scheduling.blocks import BlockManager
from headrace.workers.sim.scheduling.run import Phase, SequenceRun
from headrace.workers.sim.scheduling.waiting_queue import WaitingQueue

_STARTED = (Phase.LOADING, Phase.PREFILL)


class EngineBatch:
    """The sequences of one engine by phase. A sequence that hands over in a room (`PARKED`) is only in `runs`."""

    def __init__(self, manager: BlockManager) -> None:
        self.manager = manager
        self.runs: dict[str, SequenceRun] = {}
        self.waiting = WaitingQueue()
        self.loading: list[SequenceRun] = []
        self.prefilling: list[SequenceRun] = []
        self.decoding: list[SequenceRun] = []
        self.stuck: list[SequenceRun] = []
        self.queued_tokens = 0  # tokens to be computed or loaded for sequences that do not decode yet
        self.preemptions = 0

    @property
    def running(self) -> int:
        """Sequences that have a slot."""
        return len(self.prefilling) + len(self.decoding) + len(self.stuck) + len(self.loading)

    def wait(self, run: SequenceRun) -> None:
        """Queue a sequence, new or preempted. The tokens that the cache has now are expected to be there at its admission."""
        self.waiting.push(run)
        size = self.manager.block_size
        run.expected = size * self.manager.known(run.chain()[: (len(run.ids) - 1) // size])
        self.queued_tokens += len(run.ids) - run.expected

    def start(self, run: SequenceRun, blocks: list[int]) -> None:
        """Give the first waiting sequence a slot, with these blocks of prefix; the caller sets its phase."""
        cached = len(blocks) * self.manager.block_size
        self.waiting.pop()
        run.blocks, run.capacity, run.committed = blocks, cached, cached
        run.computed = cached
        self.queued_tokens += run.expected - cached
        taint = self.manager.taint(blocks)
        if taint != run.taint:
            run.set_taint(taint)

    def reach(self, run: SequenceRun, computed: int) -> None:
        """Note that the cache now holds this many of the sequence's tokens."""
        self.queued_tokens -= computed - run.computed
        run.computed = computed
        self.commit(run, computed)

    def prefill(self, run: SequenceRun) -> None:
        """Compute the missing tokens of this sequence from now on."""
        run.phase = Phase.PREFILL
        self.prefilling.append(run)

    def leave(self, run: SequenceRun) -> None:
        """Take a sequence out of its phase and let go of its blocks."""
        match run.phase:
            case Phase.PREFILL:
                self.prefilling.remove(run)
            case Phase.DECODE:
                self.decoding.remove(run)
            case Phase.STUCK:
                self.stuck.remove(run)
            case Phase.LOADING:
                self.loading.remove(run)
        self.manager.release(run.blocks)
        run.blocks, run.capacity, run.committed = [], 0, 0

    def drop(self, run: SequenceRun) -> None:
        """Remove a sequence that has ended."""
        self.queued_tokens -= self._remaining(run)
        if run.phase is Phase.WAITING:
            self.waiting.leave()
        self.leave(run)
        run.phase = Phase.GONE
        del self.runs[run.id]

    def _remaining(self, run: SequenceRun) -> int:
        if run.phase is Phase.WAITING:
            return len(run.ids) - run.expected
        return len(run.ids) - run.computed if run.phase in _STARTED else 0

    # -- blocks ----------------------------------------------------------------------------------------------

    def make_room(self, run: SequenceRun, count: int) -> bool:
        """Allocate blocks to a running sequence, preempting worse ones. Returns False if it was itself the worst."""
        while (blocks := self.manager.allocate(count)) is None:
            victim = max((*self.prefilling, *self.decoding), key=_rank)
            self._preempt(victim)
            if victim is run:
                return False
        run.blocks += blocks
        run.capacity += count * self.manager.block_size
        return True

    def _preempt(self, run: SequenceRun) -> None:
        self.preemptions += 1
        self.queued_tokens -= self._remaining(run)
        self.leave(run)
        run.computed = 0
        self.wait(run)

    def commit(self, run: SequenceRun, computed: int) -> None:
        """Make the blocks that are full after `computed` tokens available to others."""
        size = self.manager.block_size
        start, end = run.committed // size, computed // size
        if end <= start:
            return
        if run.taint or self.manager.known(run.chain()[start:end]) < end - start:  # else an equal answer is cached already
            self.manager.commit(run.blocks[start:end], run.contents(start, end))
        run.committed = end * size


def _rank(run: SequenceRun) -> tuple[int, int]:
    return run.rank
