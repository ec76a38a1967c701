"""`headrace replay` over a real server."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from typing import Any

import pytest

from headrace.base.errors import CommandError
from headrace.broker.codec import encode, pack_u64
from headrace.broker.messages.control import HistoryEntry, Routed
from headrace.broker.messages.events import KvStep
from headrace.broker.messages.members import WorkerMember
from headrace.cli import main
from headrace.commands.replay import recorded, run_index, run_placements
from headrace.jetstream.client import Connection
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.subjects import Subjects
from headrace.router.index.inventory import WorkerSlice
from headrace.router.index.snapshot import SnapshotStore, Source
from headrace.router.placement.types import Placement, Waiting
from headrace.router.replay import MAX_HASHES, NotKept, Recorder, rebuild
from headrace.router.session.window import HeldRequest, RequestHead

POOL = "p"


async def history(connection: Connection, subjects: Subjects) -> list[dict[str, set[int]]]:
    """What two workers held after each message; index 0: before the first."""
    rng = random.Random(5)
    held: dict[str, set[int]] = {"a": set(), "b": set()}
    numbers = {"a": 0, "b": 0}
    states = [{worker: set(blocks) for worker, blocks in held.items()}]
    for _ in range(30):
        worker = rng.choice("ab")
        removed = set(rng.sample(sorted(held[worker]), min(2, len(held[worker]))))
        stored = {rng.getrandbits(64) for _ in range(4)}
        held[worker] = held[worker] - removed | stored
        step = KvStep(
            worker=worker,
            epoch=3,
            n=numbers[worker],
            removed={"device": pack_u64(sorted(removed))},
            stored={"device": pack_u64(sorted(stored))},
        )
        numbers[worker] += 1
        await connection.publish(subjects.kv(POOL, worker), encode(step))
        states.append({worker: set(blocks) for worker, blocks in held.items()})
    return states


def options(**given: Any) -> argparse.Namespace:
    usual = {"at": 0, "block": [], "json": True, "policy": "kv", "since": 86400.0, "until": 0.0, "blocks": 0, "seed": 0}
    return argparse.Namespace(**{**usual, "differences": 20, **given})


async def test_the_index_at_any_message(connection: Connection, subjects: Subjects) -> None:
    states = await history(connection, subjects)
    for at in (1, 2, 13, 29, 30):
        report = json.loads(await run_index(connection, subjects, POOL, options(at=at)))
        counts = {worker: one["blocks"]["device"] for worker, one in report["workers"].items()}
        assert counts == {worker: len(blocks) for worker, blocks in states[at].items() if blocks or worker in counts}
        assert report["seq"] == at
        assert report["at"] > 1e9
    now = json.loads(await run_index(connection, subjects, POOL, options()))
    assert now["seq"] == 30
    block = min(states[30]["a"])
    text = await run_index(connection, subjects, POOL, options(json=False, block=[hex(block), "7"]))
    assert f"{block:#018x}: a (device)" in text
    assert "0x0000000000000007: nobody" in text
    assert "message 30 (20" in text


async def test_the_index_from_a_snapshot_and_what_follows(connection: Connection, subjects: Subjects) -> None:
    states = await history(connection, subjects)
    store = SnapshotStore(connection, subjects, POOL)
    for seq in (10, 20):
        built = await rebuild(connection, subjects, POOL, at_seq=seq)
        slices = [piece for worker in built.reader.sources.workers() if (piece := built.reader.slice(worker)) is not None]
        source = Source(POOL, 16, store.stream, (await store.state()).created)
        pieces = [WorkerSlice(*piece[:4], seq, *piece[5:]) for piece in slices]
        pointer = await store.save(source, pieces, seq=seq, at=built.at)
    assert await store.purge(pointer) == 10
    for at, source_kind in ((10, "older"), (15, "older"), (20, "snapshot"), (27, "snapshot")):
        built = await rebuild(connection, subjects, POOL, at_seq=at)
        assert (built.seq, built.source) == (at, source_kind)
        assert {w: built.caches.index.count(w) for w in "ab"} == {w: len(b) for w, b in states[at].items()}
    with pytest.raises(NotKept, match="11 to 30"):
        await rebuild(connection, subjects, POOL, at_seq=9)
    with pytest.raises(NotKept, match="11 to 30"):
        await rebuild(connection, subjects, POOL, at_seq=31)


@pytest.mark.parametrize("given", [{"at": -1}, {"block": ["x"]}, {"block": [str(1 << 64)]}])
async def test_what_cannot_be_asked(connection: Connection, subjects: Subjects, given: dict[str, Any]) -> None:
    with pytest.raises(CommandError):
        await run_index(connection, subjects, POOL, options(**given))


def held(number: int, chain: list[int]) -> HeldRequest:
    head = RequestHead(
        id=f"r{number}", judge="j", deadline=1e12, tokens=16 * len(chain), block_size=16, hashes=pack_u64(chain), tenant="t"
    )
    history: list[HistoryEntry] = []
    return HeldRequest(delivery=None, head=head, attempt=1, history=history, request_class="std")  # type: ignore[arg-type]


def placement(number: int, worker: str, chain: list[int]) -> Placement:
    request = Waiting(id=f"r{number}", tokens=16 * len(chain))
    return Placement(
        request=request, worker=worker, uncached=5, new_blocks=chain, predicted_ttft_s=0.2, waited_s=0.1, reason="load"
    )


async def test_placements_are_recorded_and_placed_again(connection: Connection, subjects: Subjects) -> None:
    with pytest.raises(CommandError, match="no record"):
        await run_placements(connection, subjects, POOL, options())
    for worker in "ab":
        member = WorkerMember(worker=worker, pool=POOL, model="m", blocks=100)
        await connection.bucket(subjects.bucket("members")).put(subjects.worker_key(POOL, worker), encode(member))
    recorder = Recorder(connection, subjects, pool=POOL, router="one")
    for number in range(40):
        chain = [100 * (number // 2 % 4) + i for i in range(10)] + [10_000 + number]
        recorder.placed(held(number, chain), placement(number, "ab"[number % 2], chain))
    connection.send(subjects.route(POOL), b"\xc1")
    records: list[Routed] = []
    async with asyncio.timeout(10):
        while len(records) < 40:
            records = await recorded(connection, subjects, POOL, since_s=0.0, until_s=1e12)
    first = records[0]
    assert (first.id, first.worker, first.router, first.tenant, first.blocks) == ("r0", "a", "one", "t", 11)
    report = json.loads(await run_placements(connection, subjects, POOL, options()))
    assert report["recorded"]["requests"] == report["replayed"]["requests"] == 40
    assert report["replayed"]["hit_blocks"] > report["recorded"]["hit_blocks"]
    text = await run_placements(connection, subjects, POOL, options(json=False, policy="random", seed=3))
    assert "go elsewhere under random" in text


async def test_long_prompts_are_recorded_by_their_beginning(connection: Connection, subjects: Subjects) -> None:
    chain = list(range(MAX_HASHES + 500))
    Recorder(connection, subjects, pool=POOL, router="one").placed(held(1, chain), placement(1, "a", chain))
    await connection.barrier()
    (record,) = await recorded(connection, subjects, POOL, since_s=0.0, until_s=1e12)
    assert (record.blocks, len(record.hashes)) == (MAX_HASHES + 500, 8 * MAX_HASHES)


def test_the_command_line(nats_server: EmbeddedServer, connection: Connection, subjects: Subjects, capsys) -> None:  # type: ignore[no-untyped-def]
    usual = ["--nats", nats_server.url, "--prefix", subjects.prefix]
    assert main(["replay", "index", "--model", "m", "--json", *usual]) == 0
    assert json.loads(capsys.readouterr().out)["workers"] == {}
    assert main(["replay", "index", "--pool", POOL, "--at", "7", *usual]) == 1
    assert "message 7 is not there: " in capsys.readouterr().err
    assert main(["replay", "placements", "--pool", POOL, *usual]) == 1
    assert "no record of a placement" in capsys.readouterr().err
    assert main(["replay", "index", "--pool", "a.b", *usual]) != 0
    assert "'a.b'" in capsys.readouterr().err
