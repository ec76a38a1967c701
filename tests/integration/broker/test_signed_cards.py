"""Signed model cards at a real nats-server: what another process writes into the bucket is neither served nor joined."""

from __future__ import annotations

import msgspec

from headrace.broker.codec import decode, encode
from headrace.broker.membership.members import Members
from headrace.broker.models.cards import ModelCard, check_signature, signed
from headrace.broker.models.directory import ModelDirectory, publish_card
from headrace.jetstream.client import Connection
from headrace.jetstream.subjects import Subjects, pool_id
from headrace.jetstream.tasks import TaskScope

KEY = b"k" * 32
FILES = {"tokenizer.json": b"{}"}
CARD = ModelCard(model="good", pool=pool_id("good"), context_length=100, block_size=16, created=2.0)


async def test_only_signed_cards_are_known(connection: Connection, subjects: Subjects) -> None:
    evil = msgspec.structs.replace(CARD, model="evil", pool=pool_id("evil"))
    await publish_card(connection, subjects, signed(evil, b"x" * 32), FILES)
    bad = msgspec.structs.replace(CARD, model="bad", pool=pool_id("bad"))
    await publish_card(connection, subjects, bad, FILES)
    await publish_card(connection, subjects, CARD, FILES, key=KEY)
    members = Members(connection, subjects, lease_ttl_s=4.0)
    directory = ModelDirectory(connection, subjects, members, signed_with=KEY)
    async with TaskScope() as tasks:
        running = [tasks.spawn(members.run()), tasks.spawn(directory.run())]
        await directory.ready(20.0)
        assert directory.names() == ["good"]
        for task in running:
            task.cancel()


async def test_a_worker_with_the_key_replaces_a_forged_card_and_keeps_nothing_of_it(
    connection: Connection, subjects: Subjects
) -> None:
    bucket = connection.bucket(subjects.bucket("models"))
    forged = msgspec.structs.replace(CARD, block_size=1, created=1.0, adapters=["evil"])
    for stored in (encode(forged), b"rubbish"):
        await bucket.put(CARD.pool, stored)
        in_force = await publish_card(connection, subjects, CARD, FILES, key=KEY)
        assert (in_force.block_size, in_force.created, in_force.adapters) == (16, 2.0, [])
        entry = await bucket.get(CARD.pool)
        assert entry is not None
        check_signature(decode(ModelCard, entry.value), KEY)


async def test_a_second_worker_joins_a_signed_card(connection: Connection, subjects: Subjects) -> None:
    await publish_card(connection, subjects, CARD, FILES, key=KEY)
    later = msgspec.structs.replace(CARD, created=9.0, context_length=50)
    in_force = await publish_card(connection, subjects, later, FILES, key=KEY)
    assert (in_force.created, in_force.context_length) == (2.0, 50)
    check_signature(in_force, KEY)
