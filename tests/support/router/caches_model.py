"""A model of the caches as the scheduler sees them, and histories that are played on both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import strategies as st

from headrace.router.errors import UnknownWorker
from headrace.router.index.types import TIERS
from headrace.router.index.view import Caches
from tests.support.router.index_model import ModelIndex, dumped

WORKERS = [f"w{n}" for n in range(4)]
TTL_S, LONG_S = 2.0, 10.0


def chain_of(turns: Sequence[int]) -> list[int]:
    """Chain values of a prompt: each depends on all before, so prompts that begin alike have the same first ones."""
    value, chain = 0, []
    for turn in turns:
        value = value * 3 + turn + 1
        chain.append(value - 1)  # 0 is legal
    return chain


CHAIN = st.lists(st.integers(0, 2), max_size=7).map(chain_of)
PART = st.tuples(CHAIN, st.integers(0, 6), st.integers(0, 7)).map(lambda got: got[0][got[1] : got[1] + got[2]])
WORKER = st.sampled_from(WORKERS)
TIERED = st.dictionaries(st.sampled_from(TIERS), PART, max_size=2)
STEP = st.one_of(
    st.tuples(st.just("apply"), WORKER, st.just(False), st.just({}), st.fixed_dictionaries({"device": CHAIN})),
    st.tuples(st.just("apply"), WORKER, st.just(False), st.fixed_dictionaries({"device": PART}), st.just({})),
    st.tuples(st.just("apply"), WORKER, st.just(True), st.just({}), TIERED),
    st.tuples(st.just("replace"), WORKER, TIERED),
    st.tuples(st.just("predict"), WORKER, CHAIN),
    st.tuples(st.just("predict"), WORKER, PART),
    st.tuples(st.just("expire"), st.sampled_from([0.0, 0.5, 1.0, 2.0, 5.0])),
    st.tuples(st.just("add"), WORKER, st.booleans(), st.sampled_from([0, 1, 3])),
    st.tuples(st.just("drop"), WORKER),
    st.tuples(st.just("track"), st.integers(0, 5), CHAIN),
    st.tuples(st.just("untrack"), st.integers(0, 5)),
    st.tuples(st.just("ask"), st.integers(0, 5)),
)


class ModelCaches:
    """What is predicted as {(worker, block): when}, in the order of placement; the rest in the model of the index."""

    def __init__(self) -> None:
        self.index = ModelIndex()
        self.placed: dict[tuple[str, int], float] = {}
        self.mode: dict[str, tuple[bool, int]] = {}

    def all(self) -> ModelIndex:
        both = ModelIndex()
        both.names = set(self.mode)
        both.entries = self.index.entries | {(worker, 3, block) for worker, block in self.placed}
        return both

    def add(self, worker: str, approximate: bool, capacity: int) -> None:
        if approximate and worker in self.mode and not self.mode[worker][0]:
            self.index.clear(worker)
        self.mode[worker] = (approximate, capacity)
        self._trim(worker)

    def drop(self, worker: str) -> None:
        self.mode.pop(worker, None)
        self._empty(worker)

    def apply(self, worker: str, cleared: bool, removed: dict[Any, list[int]], stored: dict[Any, list[int]]) -> None:
        if cleared:
            self._empty(worker)
        for tier, blocks in removed.items():
            self.index.remove(worker, tier, blocks)
        for tier, blocks in stored.items():
            self.index.store(worker, tier, blocks)
            if tier == "device":
                for block in blocks:
                    self.placed.pop((worker, block), None)

    def replace(self, worker: str, blocks: dict[Any, list[int]]) -> None:
        self.apply(worker, True, {}, blocks)

    def predict(self, worker: str, blocks: list[int], now_s: float) -> None:
        if worker in self.mode:
            for block in reversed(blocks):
                self.placed.pop((worker, block), None)
                self.placed[worker, block] = now_s
            self._trim(worker)

    def expire(self, now_s: float) -> None:
        for (worker, block), at in list(self.placed.items()):
            if at + (LONG_S if self.mode[worker][0] else TTL_S) <= now_s:
                del self.placed[worker, block]

    def _trim(self, worker: str) -> None:
        approximate, capacity = self.mode[worker]
        mine = [key for key in self.placed if key[0] == worker]
        for key in mine[: max(0, len(mine) - capacity)] if approximate and capacity else []:
            del self.placed[key]

    def _empty(self, worker: str) -> None:
        self.index.clear(worker)
        self.placed = {key: at for key, at in self.placed.items() if key[0] != worker}


def play(view: Caches, model: ModelCaches, history: list[Any]) -> None:
    now_s, chains = 100.0, dict[str, list[int]]()
    for name, *given_ in history:
        if name in ("apply", "replace") and given_[0] not in model.mode:
            with pytest.raises(UnknownWorker, match=given_[0]):
                view.apply(given_[0], removed={}, stored={}, now_s=now_s)
            with pytest.raises(UnknownWorker, match=given_[0]):
                view.replace(given_[0], {}, now_s=now_s)
            continue
        match name, given_:
            case "apply", [worker, cleared, removed, stored]:
                view.apply(worker, cleared=cleared, removed=removed, stored=stored, now_s=now_s)
                model.apply(worker, cleared, removed, stored)
            case "replace", [worker, blocks]:
                view.replace(worker, blocks, now_s=now_s)
                model.replace(worker, blocks)
            case "predict", [worker, blocks]:
                view.predict(worker, blocks, now_s=now_s)
                model.predict(worker, blocks, now_s)
            case "expire", [after_s]:
                now_s += after_s
                view.expire(now_s)
                model.expire(now_s)
            case "add", [worker, approximate, capacity]:
                view.add_worker(worker, approximate=approximate, capacity_blocks=capacity)
                model.add(worker, approximate, capacity)
            case "drop", [worker]:
                view.drop_worker(worker)
                model.drop(worker)
            case "track", [number, chain]:
                view.track(f"r{number}", chain)
                chains[f"r{number}"] = chain
            case "untrack", [number]:
                view.untrack(f"r{number}")
                chains.pop(f"r{number}", None)
            case "ask", [number] if f"r{number}" in chains:
                assert view.overlaps(f"r{number}") == model.all().match(chains[f"r{number}"])
        assert view.approximate == {worker for worker, (approximate, _) in model.mode.items() if approximate}
    compare(view, model, chains)
    for request_id in chains:
        view.untrack(request_id)
    assert view.tracked == view.watched_blocks == 0
    assert not view._chains._runs
    assert not view._chains._roots
    assert not view._chains._stale


def compare(view: Caches, model: ModelCaches, chains: dict[str, list[int]]) -> None:
    for _ in range(2):  # the second time from the cache
        for request_id, chain in chains.items():
            assert view.overlaps(request_id) == model.all().match(chain)
    for worker in model.mode:
        for chain in chains.values():
            assert view.verify(worker, chain) == model.all().match_worker(worker, chain)
        for tier in TIERS:
            assert dumped(view.index, worker, tier) == model.index.blocks(worker, tier)
