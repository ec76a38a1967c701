"""Changes merge to their net effect, and messages are small, numbered without a hole, and add up to the truth."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.broker.codec import decode
from headrace.broker.messages import KvReset, KvStep
from headrace.workers.kv.outbox import HEADROOM, Outbox
from headrace.workers.kv.translator import CacheChange
from tests.support.router.kv_reader import KvReader


def test_what_comes_and_goes_while_it_waits_is_not_told():
    outbox = Outbox(worker="w", epoch=1)
    outbox.merge(CacheChange(stored={"device": [1, 2]}))
    outbox.merge(CacheChange(removed={"device": [1]}))
    (message,) = outbox.seal({"device": {2}})
    step = decode(KvStep, message.data)
    assert (step.worker, step.epoch, step.n, step.cleared) == ("w", 1, 0, False)
    assert (step.removed, step.stored) == ({}, {"device": (2).to_bytes(8, "little")})
    assert not outbox


def test_many_changes_of_a_small_cache_become_its_inventory():
    outbox = Outbox(worker="w", epoch=1)
    outbox.merge(CacheChange(removed={"device": [*range(100)]}, stored={"host": [7]}))
    (message,) = outbox.seal({"device": set(), "host": {7}})
    step = decode(KvStep, message.data)
    assert (step.cleared, step.removed, list(step.stored)) == (True, {}, ["host"])


def test_the_first_message_of_an_epoch_may_say_that_nothing_is_there():
    (message,) = Outbox(worker="w", epoch=1).seal({})
    assert decode(KvStep, message.data) == KvStep(worker="w", epoch=1, n=0)


def test_messages_keep_to_the_size_they_may_have():
    outbox = Outbox(worker="w" * 64, epoch=2**63 - 1)
    values = {"device": set(range(2**63, 2**63 + 3000)), "host": set(range(2**62, 2**62 + 1000)), "disk": {5}}
    outbox.merge(CacheChange(stored={tier: list(v) for tier, v in values.items()}))
    most = HEADROOM + 8 * 1000
    steps = outbox.seal(values, max_bytes=most)
    parts = outbox.dump(values, max_bytes=most)
    assert [len(steps), len(parts)] == [5, 5]
    assert [message.n for message in (*steps, *parts)] == [*range(10)]
    assert max(len(message.data) for message in (*steps, *parts)) <= most
    resets = [decode(KvReset, part.data) for part in parts]
    assert [(reset.part, reset.last) for reset in resets] == [(n, n == 4) for n in range(5)]
    reader = KvReader()
    for message in (*steps, *parts):
        reader.take(message.data)
        if message.n == 4:
            assert reader.blocks == values
    assert reader.blocks == values
    assert reader.resets == 1


VALUES = st.integers(0, 12)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["change", "change", "change", "clear", "seal", "dump"]),
            st.lists(st.tuples(st.sampled_from(["device", "host"]), VALUES), max_size=6),
        ),
        max_size=30,
    ),
    st.integers(1, 4),
)
def test_a_reader_of_all_messages_knows_what_the_engine_has(history, words):
    outbox, reader = Outbox(worker="w", epoch=9), KvReader()
    truth = {"device": set(), "host": set()}
    for what, touched in [*history, ("seal", [])]:
        if what in ("change", "clear"):
            change = CacheChange(cleared=what == "clear")
            if change.cleared:
                truth = {"device": set(), "host": set()}
            for tier, value in dict.fromkeys(touched):
                if value in truth[tier]:
                    if change.cleared:
                        continue
                    truth[tier].discard(value)
                    change.removed.setdefault(tier, []).append(value)
                else:
                    truth[tier].add(value)
                    change.stored.setdefault(tier, []).append(value)
            outbox.merge(change)
        elif what == "dump" or outbox or reader.epoch is None:
            make = outbox.dump if what == "dump" else outbox.seal
            for message in make(truth, max_bytes=HEADROOM + 8 * words):
                assert message.n == reader.next
                reader.take(message.data)
            assert {tier: reader.of(tier) for tier in truth} == truth
            assert not outbox
