"""A worker announces what each rank of its engine caches, or says once that nothing will be announced."""

from __future__ import annotations

from typing import Any, cast

import pytest
import structlog

from headrace.broker.messages import WorkerMember
from headrace.jetstream.subjects import Subjects
from headrace.workers.engine import EngineInfo
from headrace.workers.kv.cache_events import CacheEvents, create_cache_events
from headrace.workers.kv.publisher import KvPublisher
from headrace.workers.kv.rank_publishers import RankPublishers


def info(**fields: Any) -> EngineInfo:
    return EngineInfo(
        engine="sim",
        version="1",
        tokenizer_dir="",
        context_length=1024,
        block_size=16,
        blocks=64,
        slots=4,
        vocab_size=100,
        eos_token_ids=(2,),
        **fields,
    )


def member(**fields: Any) -> WorkerMember:
    return WorkerMember(worker="w1", pool="p", model="m", block_size=16, **fields)


def created(about: EngineInfo, of: WorkerMember) -> CacheEvents:
    return create_cache_events(cast("Any", None), Subjects("hr"), cast("Any", None), about, of, pool_block=16)


async def test_an_engine_of_one_rank_has_one_publisher_and_one_feed() -> None:
    events = created(info(), member(kv_events=True))
    assert isinstance(events.port, KvPublisher)
    assert (len(events.feeds), len(events.caches), events.tiers()) == (1, 1, [0, 0, 0])


async def test_ranks_have_feeds_of_their_own_and_one_port() -> None:
    events = created(info(ranks=2), member(kv_events=True, ranks=2))
    assert isinstance(events.port, RankPublishers)
    assert (len(events.feeds), len(events.caches), events.tiers()) == (2, 2, [0, 0, 0])


@pytest.mark.parametrize(
    ("kinds", "role", "said"), [(("chat",), "aggregated", 1), (("embedding",), "aggregated", 0), (("chat",), "encode", 0)]
)
async def test_a_worker_without_events_has_no_parts_and_says_so_where_routers_would_count_on_them(
    kinds: tuple[str, ...], role: str, said: int
) -> None:
    with structlog.testing.capture_logs() as logs:
        events = created(info(kinds=kinds), member(role=role))
    assert (events.port, events.feeds, events.caches, events.tiers()) == (None, (), (), [])
    assert [entry["event"] for entry in logs] == ["worker.no_kv_events"] * said
