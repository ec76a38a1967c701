"""The caches as the scheduler sees them, against a model, after any history."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.router.errors import UnknownWorker
from headrace.router.index.types import TIERS, Overlap
from headrace.router.index.view import Caches, PredictedBlocks, create_index
from tests.support.router.caches_model import LONG_S, STEP, TTL_S, WORKERS, ModelCaches, chain_of, play
from tests.support.router.index_model import IMPLEMENTATIONS


@pytest.fixture(params=IMPLEMENTATIONS)
def caches(request: pytest.FixtureRequest) -> Caches:
    return Caches(create_index(request.param), predicted_ttl_s=TTL_S, approximate_ttl_s=LONG_S)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(history=st.lists(STEP, min_size=10, max_size=60))
def test_overlaps_always_equal_a_fresh_match(history: list[Any]) -> None:
    start: list[Any] = [("add", worker, False, 0) for worker in WORKERS[:3]]
    view = Caches(create_index(), predicted_ttl_s=TTL_S, approximate_ttl_s=LONG_S)
    play(view, ModelCaches(), start + history)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.slow
def test_overlaps_after_a_long_history(seed: int) -> None:
    """Many requests in few trees, so that runs are split, joined and emptied all the time."""
    rng = random.Random(seed)
    view, index = Caches(create_index()), create_index("pure")
    names = [f"w{n}" for n in range(8)]
    for name in names:
        view.add_worker(name)
        index.add_worker(name)
    stem = [rng.randrange(3) for _ in range(40)]
    chains: dict[str, list[int]] = {}
    for turn in range(1_500):
        worker, depth = rng.choice(names), rng.randrange(41)
        chain = [value % 2**64 for value in chain_of(stem[:depth] + [rng.randrange(3) for _ in range(rng.randrange(12))])]
        request_id = f"r{rng.randrange(40)}"
        if request_id in chains and rng.random() < 0.5:
            view.untrack(request_id)
            del chains[request_id]
        else:
            view.track(request_id, chain)
            chains[request_id] = chain
        tier, blocks = rng.choice(TIERS), chain[rng.randrange(len(chain) + 1) :] if rng.random() < 0.3 else chain
        if rng.random() < 0.6:
            view.apply(worker, removed={}, stored={tier: blocks}, now_s=0)
            index.store(worker, tier, blocks)
        else:
            view.apply(worker, removed={tier: blocks[-5:]}, stored={}, now_s=0)
            index.remove(worker, tier, blocks[-5:])
        for request_id in rng.sample(sorted(chains), min(3, len(chains))):
            assert view.overlaps(request_id) == index.match_exact(chains[request_id]), turn
    for request_id, chain in chains.items():
        assert view.overlaps(request_id) == index.match_exact(chain)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    chains=st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=2, max_size=5),
    steps=st.lists(
        st.tuples(st.sampled_from("ab"), st.booleans(), st.lists(st.integers(0, 5), max_size=4), st.integers(0, 4)), max_size=25
    ),
)
def test_chains_that_no_hash_could_make(chains: list[list[int]], steps: list[Any]) -> None:
    """A faulty client's blocks may stand in two places. That is slower, and right all the same."""
    view, index = Caches(create_index()), create_index("pure")
    for worker in "ab":
        view.add_worker(worker)
        index.add_worker(worker)
    for number, chain in enumerate(chains):
        view.track(str(number), chain)
    for worker, stores, blocks, asked in steps:
        if stores:
            view.apply(worker, removed={}, stored={"device": blocks}, now_s=0)
            index.store(worker, "device", blocks)
        else:
            view.apply(worker, removed={"device": blocks}, stored={}, now_s=0)
            index.remove(worker, "device", blocks)
        if asked < len(chains):
            assert view.overlaps(str(asked)) == index.match_exact(chains[asked])
    for number, chain in enumerate(chains):
        assert view.overlaps(str(number)) == index.match_exact(chain)
        view.untrack(str(number))
    assert view.watched_blocks == 0


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_eviction_reaches_the_overlaps(name: str) -> None:
    rng = random.Random(5)
    told: list[int] = []
    view = Caches(create_index(name, max_entries=300, on_evict=told.extend))
    view.add_worker("a")
    chains = {str(n): [rng.getrandbits(64) for _ in range(20)] for n in range(40)}
    for request_id, chain in chains.items():
        view.track(request_id, chain)
        view.apply("a", removed={}, stored={"device": chain}, now_s=0)
        for asked in rng.sample(sorted(chains), 5):
            known = chains[asked] if asked in view._chains._requests else []
            if known:
                assert view.overlaps(asked) == view.index.match_exact(known)
    assert len(told) == view.index.evicted > 0
    for request_id, chain in chains.items():
        assert view.overlaps(request_id) == view.index.match_exact(chain)


# -- predictions --------------------------------------------------------------------------------------------------------


def test_a_prediction_counts_until_it_expires(caches: Caches) -> None:
    caches.add_worker("a")
    caches.track("r", [1, 2, 3])
    caches.predict("a", [1, 2], now_s=10.0)
    assert caches.overlaps("r") == {"a": Overlap(2)}
    caches.expire(11.9)
    assert caches.overlaps("r") == {"a": Overlap(2)}
    caches.expire(12.0)
    assert caches.overlaps("r") == {}


def test_a_confirmed_prediction_stays(caches: Caches) -> None:
    caches.add_worker("a")
    caches.track("r", [1, 2, 3])
    caches.predict("a", [1, 2, 3], now_s=10.0)
    caches.apply("a", removed={}, stored={"device": [1, 2]}, now_s=11.0)
    assert caches.overlaps("r") == {"a": Overlap(3)}
    caches.expire(20.0)
    assert caches.overlaps("r") == {"a": Overlap(2)}
    caches.apply("a", removed={"device": [2]}, stored={}, now_s=20.0)
    assert caches.overlaps("r") == {"a": Overlap(1)}


def test_a_prediction_that_is_made_again_lives_longer(caches: Caches) -> None:
    caches.add_worker("a")
    caches.predict("a", [1, 2], now_s=10.0)
    caches.predict("a", [1], now_s=11.5)
    caches.expire(12.5)
    assert caches.verify("a", [1, 2]) == Overlap(1)
    caches.expire(13.5)
    assert caches.verify("a", [1, 2]) == Overlap(0)


def test_a_prediction_for_a_worker_that_is_gone(caches: Caches) -> None:
    caches.track("r", [1])
    caches.predict("gone", [1], now_s=0)
    assert caches.overlaps("r") == {}
    with pytest.raises(UnknownWorker, match="gone"):
        caches.verify("gone", [1])


def test_a_worker_that_comes_back_has_nothing(caches: Caches) -> None:
    caches.add_worker("a")
    caches.predict("a", [1], now_s=0)
    caches.drop_worker("a")
    caches.add_worker("a")
    caches.track("r", [1])
    assert caches.overlaps("r") == {}


# -- workers without events -----------------------------------------------------------------------------------------------


def test_an_approximate_worker_ages_by_capacity_and_time(caches: Caches) -> None:
    caches.add_worker("a", approximate=True, capacity_blocks=4)
    caches.predict("a", [1, 2, 3], now_s=0)
    caches.predict("a", [1, 9], now_s=1)
    assert caches.verify("a", [1, 2, 3]) == Overlap(3)
    caches.predict("a", [8], now_s=2)
    assert caches.verify("a", [1, 2, 3]) == Overlap(2)  # the tail went first
    assert caches.verify("a", [1, 9]) == Overlap(2)
    caches.expire(10.5)
    assert caches.verify("a", [1, 2]) == Overlap(1)
    caches.expire(13.0)
    assert caches.index.assumed == 0


def test_turning_approximate_forgets_the_events(caches: Caches) -> None:
    caches.add_worker("a")
    caches.track("r", [1, 2])
    caches.apply("a", removed={}, stored={"device": [1, 2]}, now_s=0)
    caches.predict("a", [1], now_s=1)
    assert caches.overlaps("r") == {"a": Overlap(2)}
    caches.add_worker("a", approximate=True)
    assert caches.overlaps("r") == {"a": Overlap(1)}
    caches.add_worker("a")  # its events have begun to come
    caches.expire(3.5)
    assert caches.overlaps("r") == {}


# -- cost -------------------------------------------------------------------------------------------------------------------


def test_a_step_touches_only_the_requests_it_concerns(caches: Caches) -> None:
    rng = random.Random(1)
    stem = [rng.getrandbits(64) for _ in range(50)]
    for n in range(200):
        caches.track(f"s{n}", [*stem, 10_000 + n])
        caches.track(f"o{n}", [1_000 + n])
    caches.add_worker("a")
    for request_id in list(caches._chains._requests):
        caches.overlaps(request_id)
    assert not caches.stale()
    caches.apply("a", removed={}, stored={"device": [1_007, 77, 78]}, now_s=0)
    assert set(caches.stale()) == {"o7"}
    caches.apply("a", removed={}, stored={"device": stem[:10]}, now_s=0)
    assert set(caches.stale()) == {"o7", *(f"s{n}" for n in range(200))}
    for request_id in list(caches._chains._requests):
        caches.overlaps(request_id)
    assert caches.watched_blocks == 11 + 200 + 200  # not the 50 of the stem, of which 10 are held
    caches.apply("a", removed={}, stored={"device": stem[20:]}, now_s=0)
    assert not caches.stale()


def test_a_request_that_nobody_asked_about_for_long(caches: Caches) -> None:
    """Its neighbour was asked about after each of more changes than are remembered one by one."""
    chain = list(range(1, 9))
    caches.track("asked", chain)
    caches.track("forgotten", chain)
    for name in "abc":
        caches.add_worker(name)
        caches.predict(name, chain[:2], now_s=0)
    assert caches.overlaps("forgotten") == dict.fromkeys("abc", Overlap(2))
    caches.drop_worker("b")
    caches.predict("c", chain[2:4], now_s=0)
    for turn in range(300):
        caches.apply("a", removed={"device": chain[4:]}, stored={"device": chain[2 : 4 + turn % 4]}, now_s=0)
        assert caches.overlaps("asked") == {"a": Overlap(4 + turn % 4), "c": Overlap(4)}
    assert caches.overlaps("forgotten") == {"a": Overlap(7), "c": Overlap(4)}


def test_runs_are_joined_again(caches: Caches) -> None:
    chain = list(range(1, 31))
    caches.add_worker("a")
    caches.predict("a", chain[:25], now_s=0)
    caches.track("long", chain)
    for n in range(1, 20):
        caches.track(f"r{n}", chain[:n])
    for n in range(19, 0, -1):
        caches.untrack(f"r{n}")
    assert len(caches._chains._runs) <= 9
    assert caches.overlaps("long") == {"a": Overlap(25)}


def test_a_chain_may_be_an_array(caches: Caches) -> None:
    caches.add_worker("a")
    caches.track("r", array("Q", [0, 5, 2**64 - 1]))
    caches.apply("a", removed={}, stored={"device": array("Q", [0, 5])}, now_s=0)
    assert caches.overlaps("r") == {"a": Overlap(2)}


def test_an_empty_chain_overlaps_with_nothing(caches: Caches) -> None:
    caches.add_worker("a")
    caches.track("r", [])
    assert caches.overlaps("r") == {}
    caches.untrack("r")
    with pytest.raises(KeyError):
        caches.overlaps("r")


def test_placing_the_same_blocks_for_long_takes_no_more_memory() -> None:
    assumed = PredictedBlocks(1e9)
    chain = list(range(1_000))
    for turn in range(500):
        assumed.place([*chain, 10_000 + turn % 3], float(turn))
    assert len(assumed) == 1_003
    assert assumed._named == sum(len(blocks) for _, _, blocks in assumed._placements)
    assert assumed._named <= 4 * 1_003 + 16_384 + 1_001
    assert sorted(assumed.expire(2e9)) == [*chain, 10_000, 10_001, 10_002]
    assert len(assumed) == assumed._named == 0


def test_confirmed_blocks_do_not_expire() -> None:
    assumed = PredictedBlocks(2.0)
    assert assumed.next_s() == float("inf")
    assumed.place([1, 2, 3], 0.0)
    assert sorted(assumed.confirm([2, 3, 4])) == [2, 3]
    assert assumed.next_s() == 2.0
    assert assumed.expire(1.9) == []
    assert assumed.expire(2.0) == [1]


def test_a_smaller_capacity_takes_tails_of_the_oldest_first() -> None:
    assumed = PredictedBlocks(100.0, capacity=10)
    assert assumed.place([1, 2, 3], 0.0) == []
    assert assumed.place([1, 4, 5, 6], 1.0) == []
    assumed.capacity = 3
    assert assumed.trim() == [3, 2, 6]
    assert sorted(assumed) == [1, 4, 5]
    assert assumed.place([7, 8, 9, 10], 2.0) == [5, 4, 1, 10]
