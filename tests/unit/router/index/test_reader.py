"""Order, gaps, epochs and inventories of cache events. Each test fails without the rule it names."""

from __future__ import annotations

from itertools import pairwise

import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from headrace.broker.codec import encode, pack_u64
from headrace.broker.messages.events import KvReset, KvStep
from headrace.router.index import inventory
from headrace.router.index.inventory import MAX_STEP_BLOCKS
from headrace.router.index.reader import SLICE_BLOCKS, KvEventReader
from headrace.router.index.sources import MAX_STRANGERS, STRANGER_S
from tests.support.router.cache_oracle import OracleView


class Bench:
    """A feed with a member `w` and a clock; messages get the next stream sequence."""

    def __init__(self) -> None:
        self.view = OracleView()
        self.feed = KvEventReader(self.view, self.view.index, pool="p")
        self.now = 100.0
        self.seq = 0
        self.feed.sources.put_worker("w", self.now)
        self.feed.sources.members_listed(self.now)

    def step(
        self, n: int, *stored: int, epoch: int = 7, worker: str = "w", removed: tuple[int, ...] = (), cleared: bool = False
    ) -> None:
        self.send(
            KvStep(
                worker=worker,
                epoch=epoch,
                n=n,
                stored={"device": pack_u64(stored)} if stored else {},
                removed={"device": pack_u64(removed)} if removed else {},
                cleared=cleared,
            )
        )

    def part(self, n: int, part: int, *blocks: int, dump: int = 1, last: bool = False, epoch: int = 7) -> None:
        packed = {"device": pack_u64(blocks)} if blocks else {}
        self.send(KvReset(worker="w", epoch=epoch, n=n, dump=dump, part=part, last=last, blocks=packed))

    def send(self, message: KvStep | KvReset, *, on: str = "") -> None:
        self.raw(encode(message), on=on or message.worker)

    def raw(self, data: bytes, *, on: str = "w") -> None:
        self.seq += 1
        work = self.feed.receive(on, self.seq, data, self.now)
        for _ in work or ():
            pass

    def held(self, worker: str = "w") -> set[int]:
        held = self.view.index.held.get(worker)
        return set() if held is None else set(held["device"])

    def asks(self, after_s: float = 0.0) -> list[str]:
        self.now += after_s
        return self.feed.sources.asks(self.now)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def counted(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"headrace_router_{name}_total", labels) or 0.0


def test_steps_apply_in_the_order_cleared_removed_stored(bench: Bench) -> None:
    events, blocks = counted("kv_events", kind="step"), counted("kv_blocks", change="stored")
    bench.step(0, 1, 2, 3)
    bench.step(1, 4, removed=(2, 99))
    assert (counted("kv_events", kind="step"), counted("kv_blocks", change="stored")) == (events + 2, blocks + 4)
    assert bench.held() == {1, 3, 4}
    bench.step(2, 5, 6, removed=(5,), cleared=True)
    assert bench.held() == {5, 6}
    assert bench.feed.sources.complete("w")
    assert bench.asks(5.0) == []


def test_what_is_not_newer_is_ignored(bench: Bench) -> None:
    bench.step(0, 1)
    bench.step(1, 2)
    before = counted("kv_repeated", why="duplicate")
    bench.step(1, removed=(1,))  # published again: its ack was lost
    bench.step(0, removed=(2,))
    assert bench.held() == {1, 2}
    assert counted("kv_repeated", why="duplicate") == before + 2
    assert bench.asks(5.0) == []


def test_a_gap_drops_the_worker_and_wants_its_inventory(bench: Bench) -> None:
    bench.step(0, 1, 2)
    with capture_logs() as logs:
        bench.step(2, 3)
    assert bench.held() == {3}  # what it says from now on is true, only not all
    assert not bench.feed.sources.complete("w")
    assert [entry["missing"] for entry in logs if entry["event"] == "kv.gap"] == ["epoch 7: 2 came after 0"]
    assert bench.asks() == ["w"]
    bench.step(3, 4, removed=(3,))
    bench.part(4, 0, 1, 4, last=True)
    assert bench.held() == {1, 4}
    assert bench.feed.sources.complete("w")
    assert bench.asks(100.0) == []


def test_holes_in_stream_sequences_are_no_gaps(bench: Bench) -> None:
    bench.step(0, 1)
    bench.seq += 1000
    bench.step(1, 2)
    assert bench.held() == {1, 2}
    assert bench.asks(5.0) == []


def test_a_new_epoch_from_its_beginning_starts_empty(bench: Bench) -> None:
    bench.step(0, 1)
    bench.step(0, 2, epoch=8)
    assert bench.held() == {2}
    assert bench.feed.sources.known("w") == (8, 0)
    assert bench.asks(5.0) == []
    bench.step(1, 3, epoch=7)  # published late
    assert bench.held() == {2}
    assert bench.feed.sources.known("w") == (8, 0)


def test_a_new_epoch_without_its_beginning_drops_and_asks(bench: Bench) -> None:
    bench.step(0, 1)
    bench.step(3, 2, epoch=8)
    assert bench.held() == {2}
    assert bench.asks() == ["w"]


def test_asking_is_rate_limited_and_goes_on_until_answered(bench: Bench) -> None:
    assert bench.asks() == []  # a new worker speaks by itself
    assert bench.asks(1.0) == ["w"]
    asked = [bench.now, *(bench.now for _ in range(1200) if bench.asks(0.1))]
    gaps = [round(after - before) for before, after in pairwise(asked)]
    assert gaps[:7] == [1, 2, 4, 8, 15, 30, 30]
    bench.part(5, 0, 1, last=True)
    assert bench.asks(100.0) == []


def test_no_ask_while_an_inventory_is_coming(bench: Bench) -> None:
    bench.part(3, 0, 1)
    assert bench.asks(1.5) == []
    bench.part(4, 1, 2)
    assert bench.asks(1.5) == []
    assert bench.asks(1.0) == ["w"]  # it has broken off


def test_parts_apply_together_at_the_last(bench: Bench) -> None:
    bench.step(0, 1, 2)
    bench.part(1, 0, 3)
    bench.part(2, 1, 4)
    assert bench.held() == {1, 2}
    bench.part(3, 2, 5, last=True)
    assert bench.held() == {3, 4, 5}


def test_an_incomplete_inventory_is_superseded(bench: Bench) -> None:
    bench.step(0, 1)
    bench.part(1, 0, 50, dump=1)
    bench.part(2, 0, 60, dump=2)
    bench.part(3, 1, 61, dump=2, last=True)
    assert bench.held() == {60, 61}


@pytest.mark.parametrize("how", ["step between", "part missing", "other dump"])
def test_a_broken_inventory_is_given_up_and_asked_for_again(bench: Bench, how: str) -> None:
    bench.step(0, 1)
    bench.part(1, 0, 50)
    if how == "step between":
        bench.step(2, 2)
        bench.part(3, 1, 51, last=True)
    elif how == "part missing":
        bench.part(2, 2, 51, last=True)
    else:
        bench.part(2, 1, 51, dump=9, last=True)
    assert 50 not in bench.held()
    assert 51 not in bench.held()
    assert bench.asks(3.0) == ["w"]


def test_an_inventory_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "MAX_DUMP_BLOCKS", 10)
    bench.step(0, 1)
    before = counted("kv_refused", reason="too_large")
    bench.part(1, 0, *range(100, 106))
    bench.part(2, 1, *range(200, 206))
    bench.part(3, 2, 300, last=True)
    assert bench.held() == set()
    assert counted("kv_refused", reason="too_large") == before + 1
    assert bench.asks() == ["w"]


def test_all_inventories_together_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "MAX_GATHERED_BLOCKS", 10)
    for worker in ("x", "y", "z"):
        blocks = {"device": pack_u64(range(4))}
        bench.send(KvReset(worker=worker, epoch=1, n=1, dump=1, part=0, blocks=blocks))
    assert [bench.feed.sources._states[worker].gathering is not None for worker in ("x", "y", "z")] == [True, True, False]
    bench.send(KvReset(worker="x", epoch=1, n=2, dump=1, part=1, last=True))
    assert bench.held("x") == {0, 1, 2, 3}


def test_a_gap_inside_an_inventory_gives_it_up(bench: Bench) -> None:
    bench.part(1, 0, 50)
    bench.part(3, 2, 52, last=True)
    assert bench.held() == set()
    assert bench.asks(3.0) == ["w"]


# -- bad input ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\xc1nonsense", "malformed"),
        (b"", "malformed"),
        (encode({"op": "step", "worker": "w", "epoch": "x", "n": 1}), "malformed"),
        (encode({"op": "dance", "worker": "w", "epoch": 7, "n": 1}), "malformed"),
        (encode({"v": 99, "op": "step", "worker": "w", "epoch": 7, "n": 1}), "version"),
        (encode({"v": 99, "op": "dance"}), "version"),
        (encode(KvStep(worker="w", epoch=7, n=-1)), "malformed"),
        (encode(KvStep(worker="w", epoch=-1, n=1)), "malformed"),
        (encode(KvStep(worker="other", epoch=7, n=1)), "wrong_worker"),
        (encode(KvStep(worker="w", epoch=7, n=1, stored={"device": bytes(12)})), "misaligned"),
        (encode(KvStep(worker="w", epoch=7, n=1, stored={"device": bytes(8 * 1_000_000)})), "too_large"),
        (encode(KvReset(worker="w", epoch=7, n=1, dump=1, part=0, last=True, blocks={"host": bytes(8_000_008)})), "too_large"),
    ],
)
def test_what_cannot_be_used_is_named_counted_and_repaired(bench: Bench, data: bytes, reason: str) -> None:
    bench.step(0, 1)
    before = counted("kv_refused", reason=reason)
    with capture_logs() as logs:
        bench.raw(data)
    assert counted("kv_refused", reason=reason) == before + 1
    (entry,) = [entry for entry in logs if entry["event"] == "kv.refused"]
    assert (entry["worker"], entry["reason"], entry["log_level"]) == ("w", reason, "warning")
    assert bench.asks() == ["w"]
    if reason in ("version", "misaligned", "too_large"):
        assert bench.held() == set()  # it was the worker's, and we do not know what it changed
    bench.part(2, 0, 8, 9, last=True)  # the answer repairs it, whether the bad message counted in `n` or not
    assert bench.held() == {8, 9}
    assert bench.asks(100.0) == []


def test_a_step_of_the_largest_size_is_taken(bench: Bench) -> None:
    bench.step(0, *range(MAX_STEP_BLOCKS))
    assert len(bench.held()) == MAX_STEP_BLOCKS


def test_a_flood_of_nonsense_makes_few_log_lines(bench: Bench) -> None:
    with capture_logs() as logs:
        for _ in range(500):
            bench.raw(b"\xc1")
        bench.now += 11.0
        bench.raw(b"\xc1")
    lines = [entry for entry in logs if entry["event"] == "kv.refused"]
    assert [line.get("left_out") for line in lines] == [None, 499]


def test_an_unknown_tier_is_left_out_and_the_rest_counts(bench: Bench) -> None:
    before = counted("kv_refused", reason="unknown_tier")
    bench.send(KvStep(worker="w", epoch=7, n=0, stored={"tape": pack_u64([1]), "device": pack_u64([2])}))
    assert bench.held() == {2}
    assert counted("kv_refused", reason="unknown_tier") == before + 1


def test_large_changes_come_in_slices(bench: Bench) -> None:
    blocks = range(3 * SLICE_BLOCKS + 5)
    message = KvStep(worker="w", epoch=7, n=0, stored={"device": pack_u64(blocks)})
    work = bench.feed.receive("w", 1, encode(message), 0.0)
    assert work is not None
    sizes = []
    for _ in work:
        sizes.append(len(bench.held()))
        assert bench.feed.busy == "w"
    assert sizes == [SLICE_BLOCKS, 2 * SLICE_BLOCKS, 3 * SLICE_BLOCKS, len(blocks)]
    assert bench.feed.busy == ""


# -- members -----------------------------------------------------------------------------------------------------------------


def test_events_of_a_worker_that_is_no_member_yet_are_kept_for_a_while(bench: Bench) -> None:
    bench.step(0, 1, worker="early")
    bench.now += STRANGER_S - 0.5
    assert bench.feed.expire(bench.now) == []
    bench.feed.sources.put_worker("early", bench.now)
    bench.now += 10.0
    assert bench.feed.expire(bench.now) == []
    assert bench.held("early") == {1}
    assert "early" not in bench.asks()


def test_a_stranger_that_does_not_become_a_member_is_dropped_and_never_asked(bench: Bench) -> None:
    bench.step(5, 1, worker="ghost")
    assert "ghost" not in bench.asks(2.0)
    bench.now += STRANGER_S
    assert bench.feed.expire(bench.now) == ["ghost"]
    assert "ghost" not in bench.view.index.held


def test_strangers_are_not_dropped_before_the_members_are_known() -> None:
    view = OracleView()
    feed = KvEventReader(view, view.index)
    feed.receive("w", 1, encode(KvStep(worker="w", epoch=1, n=0, stored={"device": pack_u64([5])})), 0.0)
    assert feed.expire(1000.0) == []
    feed.sources.members_listed(1000.0)
    assert feed.expire(1000.0 + STRANGER_S - 0.1) == []
    assert feed.expire(1000.0 + STRANGER_S) == ["w"]


def test_a_member_that_leaves_is_dropped_unless_it_is_back_at_once(bench: Bench) -> None:
    bench.step(0, 1)
    bench.feed.sources.remove_worker("w", bench.now)
    bench.feed.sources.put_worker("w", bench.now + 1.0)
    assert bench.feed.expire(bench.now + 60.0) == []
    assert bench.held() == {1}
    bench.feed.sources.remove_worker("w", bench.now + 60.0)
    assert bench.feed.expire(bench.now + 60.0 + STRANGER_S) == ["w"]
    assert "w" not in bench.view.index.held
    bench.step(1, 2)  # its last words arrive after all
    assert bench.feed.expire(bench.now + 200.0) == ["w"]


def test_the_number_of_strangers_is_bounded(bench: Bench) -> None:
    for number in range(MAX_STRANGERS + 10):
        bench.step(0, 1, worker=f"s{number}")
    assert len(bench.view.index.held) == MAX_STRANGERS
    bench.feed.sources.put_worker(f"s{MAX_STRANGERS + 5}", bench.now)  # refused before, a member now: its inventory is wanted
    assert bench.asks(1.0) == ["w", f"s{MAX_STRANGERS + 5}"]


def test_a_worker_without_events_is_not_asked(bench: Bench) -> None:
    bench.feed.sources.put_worker("dumb", bench.now, sends_events=False)
    assert bench.asks(5.0) == ["w"]
    bench.step(4, 1, worker="dumb")  # it does send them
    assert "dumb" in bench.asks(5.0)


def test_a_worker_dropped_from_the_view_by_somebody_else_is_begun_anew(bench: Bench) -> None:
    bench.step(0, 1)
    bench.view.drop_worker("w")
    bench.step(1, 2)
    assert bench.asks() == ["w"] or bench.asks(1.0) == ["w"]
    bench.part(2, 0, 1, 2, last=True)
    assert bench.held() == {1, 2}


def test_a_distrusted_worker_begins_anew_with_its_next_event(bench: Bench) -> None:
    bench.step(0, 1)
    bench.feed.sources.distrust("w")
    bench.step(1, 2)
    assert bench.held() == {2}
    assert not bench.feed.sources.complete("w")
