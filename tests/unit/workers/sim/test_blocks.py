"""The simulated KV cache keeps its books."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from headrace.broker.blocks import block_chain
from headrace.workers.engine import KvEvent
from headrace.workers.sim.blocks import BlockManager
from tests.support.sim_world import contents

SIZE = 2


def fill(manager: BlockManager, tokens: list[int]) -> tuple[list[int], list[int]]:
    """Do what an engine does with a prompt: reuse what is cached, compute and commit the rest. (blocks, values)"""
    chain = block_chain(tokens, SIZE)
    blocks = manager.take_prefix(chain)
    fresh = manager.allocate(len(chain) - len(blocks))
    if fresh is None:
        manager.release(blocks)
        return [], []
    start = len(blocks)
    manager.commit(fresh, contents(chain, tokens, SIZE)[start:])
    return blocks + fresh, chain


class Books(RuleBasedStateMachine):
    """Any order of use. `content` is what was really written into each block."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(8, SIZE)
        self.content: dict[int, tuple[int, ...]] = {}
        self.view: dict[int, tuple[int | None, tuple[int, ...]]] = {}

    @rule(target=held, tokens=st.lists(st.integers(0, 1), max_size=8))
    def use(self, tokens):
        chain = block_chain(tokens, SIZE)
        blocks = self.manager.take_prefix(chain)
        for n, block in enumerate(blocks):
            assert self.content[block] == tuple(tokens[: (n + 1) * SIZE]), "a block of another chain was handed out"
        self.manager.release(blocks)
        blocks, chain = fill(self.manager, tokens)
        for n, block in enumerate(blocks):
            self.content[block] = tuple(tokens[: (n + 1) * SIZE])
        return blocks

    @rule(target=held, count=st.integers(0, 9))
    def allocate(self, count):
        available = self.manager.available
        blocks = self.manager.allocate(count)
        assert (blocks is None) == (count > available)
        for block in blocks or []:
            self.content[block] = ()
        return blocks or multiple()

    @rule(blocks=consumes(held))
    def release(self, blocks):
        self.manager.release(blocks)

    @rule()
    def clear(self):
        self.manager.clear()

    @invariant()
    def books_balance(self):
        self.manager.check()

    @invariant()
    def events_tell_what_is_cached(self):
        apply(self.view, self.manager.take_events())
        truth: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        apply(truth, self.manager.inventory())
        assert self.view == truth
        assert len(truth) == self.manager.cached


def apply(view: dict[int, tuple[int | None, tuple[int, ...]]], events: list[KvEvent]) -> None:
    for event in events:
        match event.kind:
            case "cleared":
                view.clear()
            case "removed":
                for value in event.hashes:
                    del view[value]
            case "stored":
                parent = event.parent
                for n, value in enumerate(event.hashes):
                    assert value not in view
                    view[value] = (parent, tuple(event.token_ids[n * SIZE : (n + 1) * SIZE]))
                    parent = value


Books.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestBooks = Books.TestCase


def test_the_least_recently_used_content_goes_first_and_its_end_before_its_beginning():
    manager = BlockManager(4, SIZE)
    old, old_chain = fill(manager, [1, 1, 2, 2])
    new, new_chain = fill(manager, [3, 3, 4, 4])
    manager.release(old)
    manager.release(new)
    assert manager.allocate(1) is not None
    assert [len(manager.take_prefix(chain)) for chain in (old_chain, new_chain)] == [1, 2]


def test_content_used_again_is_young_again():
    manager = BlockManager(2, SIZE)
    first, first_chain = fill(manager, [1, 1])
    second, second_chain = fill(manager, [2, 2])
    manager.release(first)
    manager.release(second)
    manager.release(manager.take_prefix(first_chain))
    manager.allocate(1)
    assert manager.take_prefix(second_chain) == []
    assert manager.take_prefix(first_chain) == first


def test_blocks_of_a_sequence_lie_side_by_side():
    manager = BlockManager(16, SIZE)
    scattered = manager.allocate(6)
    assert scattered is not None
    manager.release([scattered[4], scattered[1], scattered[2]])
    assert manager.allocate(2) == [1, 2]
    assert manager.allocate(3) == [4, 6, 7]


def test_what_a_block_holds_is_known_until_it_is_handed_out_again():
    manager = BlockManager(2, SIZE)
    (block,) = manager.allocate(1) or []
    unknown = manager.cell(block)
    manager.set_cell(block, 77)
    manager.release([block])
    assert manager.cell(block) == 77
    assert manager.allocate(1) == [block]
    assert manager.cell(block) == unknown
    manager.commit([block], contents([5], [1, 1], SIZE))
    assert manager.cell(block) == 5
    assert manager.taint([block]) == 0


def test_releasing_what_nobody_holds_is_an_error():
    with pytest.raises(AssertionError, match="block 3"):
        BlockManager(4, SIZE).release([3])
