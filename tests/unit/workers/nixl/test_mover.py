"""Parts, turns, deadlines and ends, with NIXL played by scripted handles and a clock by hand."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.workers.nixl import mover
from headrace.workers.nixl.descriptors import BlocksBusy, DescriptorRun, DriverFailed, PeerGone
from headrace.workers.nixl.driver import Status
from headrace.workers.nixl.mover import MOST_POSTED, TURN_S, Transfer, TransferJob, TransferQueue

MOVING, DONE = Status.MOVING, Status.DONE


class FakePosts:
    """Handles whose state the test sets. Complains when one is released while it moves, or twice."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.post_takes_s = 0.0
        self.on_post: Status | Exception = MOVING
        self.states: dict[int, Status | Exception] = {}
        self.released: list[int] = []

    def make(self, part: DescriptorRun) -> int:
        return len(self.states) + 1

    def post(self, handle: int) -> Status:
        self.now_s += self.post_takes_s
        self.states[handle] = self.on_post
        return self.status(handle)

    def status(self, handle: int) -> Status:
        assert handle not in self.released, "a freed handle was used"
        state = self.states[handle]
        if isinstance(state, Exception):
            raise state
        return state

    def moved(self, handle: int) -> tuple[int, int]:
        assert self.status(handle) is DONE
        return 10, 1

    def release(self, handle: int) -> None:
        assert handle not in self.released
        assert self.states[handle] is not MOVING, "a handle was freed while NIXL used it"
        self.released.append(handle)

    def end(self, state: Status | Exception = DONE) -> None:
        """Everything posted so far comes to this end."""
        self.states.update({handle: state for handle, was in self.states.items() if was is MOVING})


class World:
    """A mover over fake handles."""

    def __init__(self) -> None:
        self.posts = FakePosts()
        self.lost: list[str] = []
        self.mover = TransferQueue(self.posts, clock=lambda: self.posts.now_s, lost=self.lost.append)

    def start(
        self,
        parts: int = 1,
        *,
        peer: str = "p",
        deadline_s: float = 10.0,
        finish: Callable[[], None] | None = None,
        first: int = 0,
    ) -> Transfer:
        local = np.arange(first, first + parts, dtype=np.int32)
        transfer = Transfer("read", peer, local, parts * 10)
        cut = deque(DescriptorRun(local[n : n + 1], local[n : n + 1], 1) for n in range(parts))
        self.mover.start(
            TransferJob(
                transfer,
                cut,
                self.posts.make,
                began_s=self.posts.now_s,
                deadline_s=self.posts.now_s + deadline_s,
                finish=finish,
            )
        )
        return transfer

    def poll(self) -> list[Transfer]:
        self.mover.advance()
        return self.mover.take_ended()


@pytest.fixture
def world() -> World:
    return World()


def test_a_transfer_is_done_when_all_its_parts_are(world: World) -> None:
    transfer = world.start(3)
    assert world.poll() == []
    world.posts.states[1] = world.posts.states[2] = DONE
    assert world.poll() == []
    world.posts.now_s = 2.5
    world.posts.end()
    assert world.poll() == [transfer]
    assert (transfer.state, transfer.settled, transfer.descriptors, transfer.took_s) == ("done", True, 3, 2.5)
    assert sorted(world.posts.released) == [1, 2, 3]


def test_an_end_is_told_once_and_counts_as_active_until_then(world: World) -> None:
    world.posts.on_post = DONE
    transfer = world.start()
    assert (transfer.state, world.mover.active) == ("done", 1)
    assert world.poll() == [transfer]
    assert (world.poll(), world.mover.active) == ([], 0)


def test_a_call_posts_for_one_turn_only(world: World) -> None:
    world.posts.on_post, world.posts.post_takes_s = DONE, TURN_S / 2
    transfer = world.start(6)
    assert len(world.posts.states) == 2
    world.poll()
    assert len(world.posts.states) == 4
    world.poll()
    world.poll()
    assert transfer.state == "done"


def test_transfers_take_turns(world: World) -> None:
    world.posts.on_post, world.posts.post_takes_s = DONE, TURN_S
    transfers = [world.start(3), world.start(3)]
    world.poll()
    world.poll()
    assert len(world.posts.states) == 4
    world.poll()
    assert [transfer.state for transfer in transfers].count("done") <= 1
    world.poll()
    assert [transfer.state for transfer in transfers] == ["done", "done"]


def test_no_more_than_so_many_parts_are_under_way(world: World) -> None:
    world.start(MOST_POSTED + 5)
    assert len(world.posts.states) == MOST_POSTED
    world.posts.end()
    world.poll()
    assert len(world.posts.states) == MOST_POSTED + 5


def test_a_late_transfer_fails_and_settles_only_when_its_parts_have_ended(world: World) -> None:
    transfer = world.start(2, deadline_s=1.0)
    world.posts.now_s = 1.0
    assert world.poll() == [transfer]
    assert (transfer.state, transfer.reason, transfer.settled) == ("failed", "deadline", False)
    assert "1 s" in transfer.error
    assert world.mover.unsettled == 1
    with pytest.raises(BlocksBusy, match="block 1"):
        world.mover.check_free(np.array([5, 1], dtype=np.int32))
    world.mover.check_free(np.array([2, 3], dtype=np.int32))
    world.posts.states[1] = DONE
    world.poll()
    assert not transfer.settled
    world.posts.end()
    assert world.poll() == []
    assert (transfer.settled, transfer.state, world.mover.unsettled) == (True, "failed", 0)
    assert sorted(world.posts.released) == [1, 2]
    world.mover.check_free(np.array([1], dtype=np.int32))


def test_a_late_transfer_posts_nothing_more(world: World) -> None:
    transfer = world.start(MOST_POSTED + 1, deadline_s=1.0)
    world.posts.now_s = 1.0
    world.posts.end()
    world.poll()
    assert len(world.posts.states) == MOST_POSTED
    assert (transfer.reason, transfer.settled) == ("deadline", True)


def test_a_deadline_within_a_turn_counts(world: World) -> None:
    world.posts.on_post, world.posts.post_takes_s = DONE, TURN_S / 8
    transfer = world.start(4, deadline_s=TURN_S / 4)
    assert len(world.posts.states) == 2
    assert (transfer.state, transfer.reason, transfer.settled) == ("failed", "deadline", True)


def test_a_transfer_that_was_complete_at_its_deadline_is_done(world: World) -> None:
    transfer = world.start(deadline_s=1.0)
    world.posts.now_s = 5.0
    world.posts.end()
    world.poll()
    assert transfer.state == "done"


def test_a_lost_peer_is_told_and_blamed(world: World) -> None:
    transfer = world.start(2)
    world.posts.states[1] = PeerGone("disconnected")
    assert world.poll() == [transfer]
    assert (transfer.reason, transfer.error, transfer.settled) == ("peer_gone", "disconnected", False)
    assert world.lost == ["p"]
    world.posts.end(PeerGone("disconnected"))
    world.poll()
    assert transfer.settled


@pytest.mark.parametrize(("error", "reason"), [(PeerGone("gone"), "peer_gone"), (DriverFailed("no"), "refused")])
def test_a_part_that_cannot_be_posted_fails_the_transfer(world: World, error: Exception, reason: str) -> None:
    world.posts.on_post = error
    transfer = world.start(3)
    assert (transfer.state, transfer.reason, transfer.settled) == ("failed", reason, True)
    assert world.lost == (["p"] if reason == "peer_gone" else [])
    assert world.posts.released == [1]


def test_the_finish_comes_after_all_parts_and_can_fail(world: World) -> None:
    seen: list[int] = []

    def finish() -> None:
        seen.append(len(world.posts.released))
        raise PeerGone("no notice")

    transfer = world.start(2, finish=finish)
    world.posts.states[1] = DONE
    world.poll()
    assert seen == []
    world.posts.end()
    world.poll()
    assert seen == [2]
    assert (transfer.state, transfer.reason, transfer.settled) == ("failed", "peer_gone", True)


def test_giving_up_a_peer_leaves_the_others_alone(world: World) -> None:
    gone, other = world.start(peer="a"), world.start(peer="b", first=5)
    world.mover.fail_peer("a", "forgotten", "forgotten")
    assert (gone.reason, other.state) == ("forgotten", "active")
    assert world.mover.unsettled_with("a")
    assert not world.mover.unsettled_with("b")
    world.posts.end()
    assert world.poll() == [gone, other]
    assert not world.mover.unsettled_with("a")


def test_metrics_tell_bytes_ends_and_what_is_unsettled(world: World) -> None:
    def sample(metric: object, *labels: str) -> float:
        return float((metric.labels(*labels) if labels else metric)._value.get())  # type: ignore[attr-defined]

    before = [
        sample(mover.BYTES, "read"),
        sample(mover.TRANSFERS, "read", "done"),
        sample(mover.FAILURES, "read", "deadline"),
        sample(mover.UNSETTLED),
    ]
    world.start(2)
    world.posts.end()
    world.poll()
    world.start(deadline_s=1.0)
    world.posts.now_s = 1.0
    world.poll()
    after = [
        sample(mover.BYTES, "read"),
        sample(mover.TRANSFERS, "read", "done"),
        sample(mover.FAILURES, "read", "deadline"),
        sample(mover.UNSETTLED),
    ]
    assert [now - then for now, then in zip(after, before, strict=True)] == [20, 1, 1, 1]
    world.posts.end()
    world.poll()
    assert sample(mover.UNSETTLED) == before[3]


@settings(deadline=None)
@given(st.data())
def test_whatever_nixl_does_everything_ends_once_and_every_handle_is_freed_once(data: st.DataObject) -> None:
    world, ended = World(), []
    states = st.sampled_from((MOVING, MOVING, DONE, DONE, PeerGone("gone"), DriverFailed("no")))
    transfers = []
    for step in range(data.draw(st.integers(1, 25))):
        world.posts.on_post = data.draw(states)
        if data.draw(st.booleans()):
            transfers.append(
                world.start(data.draw(st.integers(1, 5)), peer=data.draw(st.sampled_from("ab")), first=100 * step, deadline_s=3)
            )
        world.posts.now_s += data.draw(st.floats(0, 2))
        for handle, state in list(world.posts.states.items()):
            if state is MOVING:
                world.posts.states[handle] = data.draw(states)
        if data.draw(st.booleans()):
            world.mover.fail_peer("a", "forgotten", "forgotten")
        ended += world.poll()
    world.posts.on_post = MOVING
    world.posts.now_s += 100
    ended += world.poll()
    assert sorted(map(id, ended)) == sorted(map(id, transfers))
    assert world.mover.active == 0
    world.posts.end()
    world.poll()
    assert all(transfer.settled and transfer.state != "active" for transfer in transfers)
    assert sorted(world.posts.released) == sorted(world.posts.states)
