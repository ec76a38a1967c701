"""Hand-overs under aborts, broken and stalled transfers and deaths in any order: nothing hangs, and no block leaks."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.workers.engine import Handover
from headrace.workers.sim.fabric import LocalFabric
from headrace.workers.sim.settings import SequenceFaults
from headrace.workers.sim.tokens import expected_ids
from tests.support.sim_world import HoldingFabric, Node, World

moves = st.lists(
    st.tuples(
        st.sampled_from(["prefill", "decode", "break", "stall", "abort p", "abort d", "release", "end", "kill p", "kill d"]),
        st.integers(0, 5),  # which request, or transfer
        st.sampled_from([0.0, 0.3, 1.1, 2.6]),  # and then time passes
    ),
    max_size=25,
)


class Chaos:
    """A pair of engines to which anything may happen; six requests, each with one prompt of its own."""

    def __init__(self, how: str, *, held: bool, **options: Any) -> None:
        self.fabric = HoldingFabric() if held else LocalFabric()
        self.world = World(self.fabric)
        self.rooms = how == "room"
        self.p, self.d = self.world.pair(
            disagg="rendezvous" if self.rooms else "params", transfer_mode="push" if how == "push" else "pull", **options
        )
        self.sent: set[tuple[Node, int]] = set()
        self.aborted: set[tuple[Node, int]] = set()
        self.freed: set[int] = set()  # pulled: requests whose blocks the prefill side freed before they were fetched

    @staticmethod
    def prompt(n: int) -> list[int]:
        return [n % 3] * (3 + 7 * n)

    def do(self, move: str, n: int) -> None:
        """Make a move. The prefill side may free blocks under a reader: that is its caller's mistake, and shows as stale."""
        offers = self._offers()
        self._do(move, n)
        if self._offers() < offers and move in ("abort p", "release"):
            self.freed.add(n)

    def _offers(self) -> int:
        side = self.p.scheduler.exchange.prefill_side
        assert side is not None
        return side.holding

    def _do(self, move: str, n: int) -> None:
        node = self.d if move.endswith(" d") else self.p
        match move.split()[0]:
            case "prefill":
                self._submit(self.p, n, Handover(kind="prefill", room=n if self.rooms else None), SequenceFaults())
            case "decode" | "break" | "stall":
                self._decode(n, SequenceFaults(transfer_breaks=move == "break", stall_transfer=move == "stall"))
            case "abort":
                self.aborted.add((node, n))
                node.scheduler.abort([str(n)])
            case "release":
                assert node.member is not None
                node.member.release_sequence(str(n), None)
            case "kill":
                if n == 0 and node.alive:
                    node.kill()
            case "end" if isinstance(self.fabric, HoldingFabric) and n < len(self.fabric.held):
                self.fabric.held[n].end()

    def _decode(self, n: int, faults: SequenceFaults) -> None:
        if self.rooms:
            self._submit(self.d, n, Handover(kind="decode", room=n, peer="p"), faults)
        elif self.p.ended(str(n)) and (params := self.p.params(str(n))):
            self._submit(self.d, n, Handover(kind="decode", params=params), faults)

    def _submit(self, node: Node, n: int, handover: Handover, faults: SequenceFaults) -> None:
        if node.alive and (node, n) not in self.sent:
            self.sent.add((node, n))
            node.submit(str(n), self.prompt(n), handover=handover, faults=faults)

    def settle(self) -> None:
        """All deadlines pass, and then all transfers end."""
        self.world.run(3000)
        for transfer in self.fabric.held if isinstance(self.fabric, HoldingFabric) else ():
            transfer.end()
        self.world.run(3000)


@settings(max_examples=100, deadline=None)
@example([("prefill", 1, 0.0), ("prefill", 0, 0.0), ("decode", 1, 0.0), ("abort p", 1, 0.0)], "pull", "recompute", 0, False)
@given(
    moves, st.sampled_from(["pull", "push", "room"]), st.sampled_from(["recompute", "fail"]), st.integers(0, 12), st.booleans()
)
def test_no_sequence_hangs_and_no_block_leaks_whatever_happens(drawn, how, policy, spare, held):
    """`held`: transfers end when a move says so, or only after their deadline."""
    chaos = Chaos(
        how,
        held=held,
        load_failure=policy,
        lease_s=500.0,  # no stale blocks here
        blocks=16 + spare,
        context_length=64,
        slots=3,
        timing_overrides={"decode_base_s": 0.1, "kv_bytes_per_token": 1.0, "transfer_bytes_per_s": 20.0},
    )
    for move, n, pause in drawn:
        chaos.do(move, n)
        chaos.world.run(pause)
    chaos.settle()
    wrong = set()
    for node in (chaos.p, chaos.d):
        if not node.alive:
            continue
        assert node.used == 0
        assert node.scheduler.idle
        load = node.scheduler.load()
        assert (load.running, load.waiting, load.queued_prefill_tokens) == (0, 0, 0)
        for n in {n for where, n in chaos.sent if where is node}:
            assert node.ended(str(n)) or (node, n) in chaos.aborted
            if node.ended(str(n)) and node.last(str(n)).finish:
                right = node.ids(str(n)) == expected_ids(chaos.prompt(n), 10 if node is chaos.d else 1)
                assert right or node is chaos.d
                wrong |= set() if right else {n}
    assert wrong <= (chaos.freed if how == "pull" else set())
    if chaos.d.alive:
        stale = chaos.d.scheduler.stats()["stale_fetches"]
        assert len(wrong) <= stale <= (len(chaos.freed) if how == "pull" else 0)
