"""An engine's hashes become chain values, and the inventory is what the engine holds, whatever it does."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.broker.blocks import MediaSpan, block_chain
from headrace.workers.engine import KvBatch, KvEvent
from headrace.workers.kv.translator import CacheChange, Translator

SIZE = 4
TOKENS = [*range(100, 120)]  # five blocks
CHAIN = block_chain(TOKENS, SIZE)


def stored(hashes: list[int], tokens: list[int], parent: int | None = None, **options: object) -> KvEvent:
    return KvEvent(kind="stored", hashes=hashes, token_ids=tokens, parent=parent, **options)  # type: ignore[arg-type]


def removed(*hashes: int, **options: object) -> KvEvent:
    return KvEvent(kind="removed", hashes=hashes, **options)  # type: ignore[arg-type]


CLEARED = KvEvent(kind="cleared")


class Bench:
    def __init__(self, **options: int) -> None:
        self.translator = Translator(SIZE, **options)
        self.n = 0
        self.view: dict[str, set[int]] = {"device": set(), "host": set(), "disk": set()}

    def __call__(self, *events: KvEvent, partial: bool = False) -> CacheChange:
        change = self.translator.apply(KvBatch(events, self.n, partial=partial))
        self.n += 1
        if change.cleared:
            self.view = {tier: set() for tier in self.view}
        for tier, values in change.removed.items():
            assert set(values) <= self.view[tier]
            assert len(set(values)) == len(values)
            self.view[tier] -= set(values)
        for tier, values in change.stored.items():
            assert not set(values) & self.view[tier]
            assert len(set(values)) == len(values)
            self.view[tier] |= set(values)
        assert self.view == {tier: set(values) for tier, values in self.translator.inventory().items()}
        return change

    @property
    def device(self) -> set[int]:
        return self.view["device"]


def test_a_prompt_gets_the_names_that_an_ingress_gives_it():
    bench = Bench()
    change = bench(stored([1, 2, 3], TOKENS[:12]), stored([4, 5], TOKENS[12:], parent=3))
    assert change.stored == {"device": CHAIN}


@pytest.mark.parametrize("options", [{"adapter": "a"}, {"salt": "s"}, {"adapter": "a", "salt": "s"}])
def test_adapter_and_salt_are_part_of_the_name(options):
    bench = Bench()
    bench(stored([1, 2], TOKENS[:8], **options), stored([3], TOKENS[8:12], parent=2))
    assert bench.device == set(block_chain(TOKENS[:12], SIZE, **options))


def test_media_are_part_of_the_name():
    bench = Bench()
    bench(stored([1, 2, 3], TOKENS[:12], media=[[(7, 2)], [(7, 0), (9, 3)], [(9, 0)]]))
    spans = [MediaSpan(2, 5, 7), MediaSpan(7, 3, 9)]
    assert bench.device == set(block_chain(TOKENS[:12], SIZE, media=spans))


def test_removal_knows_blocks_by_the_engines_hash():
    bench = Bench()
    bench(stored([1, 2, 3], TOKENS[:12]))
    assert bench(removed(2)).removed == {"device": [CHAIN[1]]}
    assert bench.device == {CHAIN[0], CHAIN[2]}


def test_a_step_that_changes_nothing_in_the_end_says_nothing():
    bench = Bench()
    bench(stored([1], TOKENS[:4]))
    assert not bench(removed(1), stored([1], TOKENS[:4]))
    assert not bench(stored([2], TOKENS[4:8], parent=1), removed(2))


def test_copies_on_the_device_are_counted():
    bench = Bench()
    bench(stored([1], TOKENS[:4]), stored([1], TOKENS[:4]))
    assert not bench(removed(1))
    assert bench(removed(1)).removed == {"device": CHAIN[:1]}


def test_two_hashes_of_one_value_are_counted():
    bench = Bench()
    bench(stored([1], TOKENS[:4]), stored([11], TOKENS[:4]))
    assert not bench(removed(1))
    assert bench(removed(11)).removed == {"device": CHAIN[:1]}


def test_a_lower_tier_that_repeats_itself_has_the_block_once():
    bench = Bench()
    bench(stored([1], TOKENS[:4], tier="host"), stored([1], TOKENS[:4], tier="host"))
    assert bench(removed(1, tier="host")).removed == {"host": CHAIN[:1]}


def test_a_block_moves_down_the_tiers_by_its_hash_alone():
    bench = Bench()
    bench(stored([1, 2], TOKENS[:8]))
    change = bench(removed(2), stored([2], [], parent=None, tier="host"))
    assert (change.removed, change.stored) == ({"device": [CHAIN[1]]}, {"host": [CHAIN[1]]})


def test_a_lower_tier_that_tells_no_content_waits_for_the_device():
    bench = Bench()
    assert not bench(stored([1], [], tier="host"))
    change = bench(stored([1], TOKENS[:4], salt="tenant"))
    salted = block_chain(TOKENS[:4], SIZE, salt="tenant")
    assert change.stored == {"device": salted, "host": salted}


def test_the_child_of_a_block_that_has_just_gone_is_still_named():
    bench = Bench()
    bench(stored([1], TOKENS[:4]))
    bench(removed(1))
    bench(stored([2], TOKENS[4:8], parent=1))
    assert bench.device == {CHAIN[1]}
    assert not bench.translator.lost


def test_what_is_remembered_of_the_past_is_bounded():
    bench = Bench(blocks=10)
    for n in range(6000):
        bench.translator.apply(KvBatch([stored([n], [n] * SIZE), removed(n)], n))
    assert bench.translator.remembered == 4096


def test_an_inventory_may_come_in_any_order():
    bench = Bench()
    bench(CLEARED, stored([3], TOKENS[8:12], parent=2), stored([2], TOKENS[4:8], parent=1), stored([1], TOKENS[:4]))
    assert bench.device == set(CHAIN[:3])
    assert not bench.translator.lost


def test_an_unknown_parent_asks_for_the_cache_to_be_read_anew():
    bench = Bench()
    bench(stored([2], TOKENS[4:8], parent=1))
    assert bench.translator.lost
    assert bench.translator.anomalies.orphans == bench.translator.anomalies.unplaced == 1
    assert not bench.device
    bench(CLEARED, stored([1], TOKENS[:4]), stored([2], TOKENS[4:8], parent=1))
    assert not bench.translator.lost
    assert bench.device == set(CHAIN[:2])


def test_where_the_engine_cannot_tell_everything_unknown_parents_are_no_surprise():
    bench = Bench()
    bench(CLEARED, partial=True)
    bench(stored([2], TOKENS[4:8], parent=1), stored([9], TOKENS[:4]))
    assert not bench.translator.lost
    assert bench.translator.anomalies.unplaced == 1
    assert bench.device == {CHAIN[0]}
    bench(removed(2))
    assert bench.translator.anomalies.unknown_removed == 0


def test_a_clear_is_told_in_one_word_and_a_new_reading_by_what_differs():
    bench = Bench()
    bench(stored([1, 2, 3], TOKENS[:12]))
    change = bench(CLEARED, stored([1, 2], TOKENS[:8]))
    assert (change.cleared, change.removed, change.stored) == (False, {"device": [CHAIN[2]]}, {})
    change = bench(CLEARED)
    assert (change.cleared, change.removed, change.stored) == (True, {}, {})
    assert not bench(CLEARED)


def test_a_clear_in_the_middle_of_a_step_counts_from_the_beginning_of_the_step():
    bench = Bench()
    bench(stored([1], TOKENS[:4]))
    change = bench(removed(1), stored([2], TOKENS[4:8], parent=1), CLEARED, stored([1], TOKENS[:4]), stored([9], [1] * 4))
    assert (change.cleared, change.removed) == (False, {})
    assert len(change.stored["device"]) == 1


def test_a_block_longer_than_the_pools_is_several_blocks():
    bench = Bench()
    bench(stored([1, 2], TOKENS[:16]), stored([3], [*TOKENS[16:], *range(4)], parent=2))
    assert bench.device == set(block_chain([*TOKENS, *range(4)], SIZE))
    assert bench(removed(2)).removed == {"device": CHAIN[2:4]}


@pytest.mark.parametrize(("hashes", "tokens"), [([1, 2], 4), ([1], 6), ([1, 2], 12)])
def test_blocks_that_cannot_be_cut_into_the_pools_are_refused(hashes, tokens):
    bench = Bench()
    bench(stored(hashes, TOKENS[:tokens]))
    assert not bench.device
    assert bench.translator.anomalies.odd_sizes == 1
    assert bench.translator.odd_size == tokens // len(hashes)


def test_of_several_groups_only_what_all_of_them_have_counts():
    bench = Bench()
    bench(stored([1, 2, 3], TOKENS[:12], group=0))
    assert bench.device == set(CHAIN[:3])  # as far as anybody knows there is one group
    bench(stored([2, 3], TOKENS[:12], group=1, block_size=SIZE))  # a sliding window: the first block is left out
    assert bench.device == set(CHAIN[1:3])
    bench(removed(2, group=1))
    assert bench.device == {CHAIN[2]}
    bench(removed(3, group=0))
    assert not bench.device


def test_a_group_that_comes_first_waits_for_the_one_that_knows_the_content():
    bench = Bench()
    bench(stored([2], TOKENS[:8], group=1, block_size=SIZE), stored([1, 2], TOKENS[:8], group=0))
    assert bench.device == {CHAIN[1]}
    assert bench.translator.anomalies.unplaced == 0


def test_groups_stay_known_when_the_cache_is_cleared():
    bench = Bench()
    bench(stored([1], TOKENS[:4], group=0), stored([1], TOKENS[:4], group=1))
    bench(CLEARED, stored([1], TOKENS[:4], group=0))
    assert not bench.device


class Model:
    """An engine that stores, copies, evicts and moves blocks of a few prompts, in several groups."""

    def __init__(self, groups: int) -> None:
        self.groups = groups
        self.copies: Counter[tuple[str, int, int]] = Counter()  # (tier, group, prompt × 10 + block)

    def hashes_held(self, tier: str) -> set[int]:
        seen = {hash_ for (t, _, hash_), n in self.copies.items() if t == tier and n}
        return {h for h in seen if all(self.copies[tier, group, h] for group in range(self.groups))}


PROMPTS = [[*range(p, p + 12)] for p in (0, 50)]
VALUE = {p * 10 + b: block_chain(PROMPTS[p], SIZE)[b] for p in range(2) for b in range(3)}


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 2),
    st.lists(
        st.lists(
            st.tuples(st.sampled_from(["store", "drop", "clear"]), st.integers(0, 1), st.integers(0, 2), st.integers(0, 2)),
            max_size=5,
        ),
        max_size=12,
    ),
)
def test_the_inventory_is_what_the_engine_holds(groups, steps):
    model, bench = Model(groups), Bench()
    everything = [stored([p * 10 + b for b in range(3)], PROMPTS[p], group=g) for p in range(2) for g in range(groups)]
    # all blocks were there once, so that every parent is known; and the lower tier has seen all groups
    bench(*everything, *(stored([0], PROMPTS[0][:4], group=g, tier="host") for g in range(groups)))
    bench(CLEARED)
    for step in steps:
        events = []
        for what, prompt, block, where in step:
            tier, group, hash_ = ("host" if where == 2 else "device"), where % groups, prompt * 10 + block
            key = (tier, group, hash_)
            if what == "clear" and block == 0 and where == 0:
                model.copies.clear()
                events.append(CLEARED)
            elif what == "store":
                model.copies[key] = 1 if tier == "host" else model.copies[key] + 1
                parent = hash_ - 1 if block else None
                content = PROMPTS[prompt][block * SIZE :][:SIZE]
                events.append(stored([hash_], content, parent=parent, group=group, tier=tier))
            elif what == "drop" and model.copies[key]:
                model.copies[key] -= 1
                events.append(removed(hash_, group=group, tier=tier))
        bench(*events)
        for tier in ("device", "host"):
            assert bench.view[tier] == {VALUE[hash_] for hash_ in model.hashes_held(tier)}
    assert not bench.translator.lost
    assert bench.translator.anomalies.unknown_removed == 0
