"""Wires a worker's cache events: per rank of the engine a translator with its feed and its publisher."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

import structlog

from headrace.broker.messages import WorkerMember
from headrace.broker.places import place_name, ranks_of
from headrace.broker.worker.ports import KvPort
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects
from headrace.workers.engine import POOLING_KINDS, Engine, EngineInfo
from headrace.workers.kv.feed import KvFeed
from headrace.workers.kv.publisher import KvPublisher
from headrace.workers.kv.rank_publishers import RankPublishers
from headrace.workers.kv.translator import Translator

log = structlog.get_logger()


@dataclass(frozen=True)
class CacheEvents:
    """Parts that announce an engine's cached blocks. All are empty for an engine without cache events."""

    port: KvPort | None = None  # for the session
    feeds: tuple[KvFeed, ...] = ()  # to be run, one per rank
    caches: tuple[Callable[[], Container[int]], ...] = ()  # per rank the chain values on the device
    tiers: Callable[[], list[int]] = list  # the blocks that all ranks hold together, per tier


def create_cache_events(
    connection: Messaging, subjects: Subjects, engine: Engine, info: EngineInfo, member: WorkerMember, *, pool_block: int
) -> CacheEvents:
    """Create the parts for a worker as its member record announces it: none where it says that it sends no cache events.

    `pool_block`: the tokens of the pool's blocks, into which those of the engine are cut.
    """
    if not member.kv_events:
        if not POOLING_KINDS & set(info.kinds) and member.role != "encode":
            log.warning(
                "worker.no_kv_events", engine=info.engine, meaning="routers guess from their own placements what it caches"
            )
        return CacheEvents()
    publishers, feeds, caches, translators = [], [], [], []
    for rank in ranks_of(info.ranks):
        translator = Translator(pool_block, blocks=info.blocks // info.ranks)
        publisher = KvPublisher(
            connection,
            subjects,
            pool=member.pool,
            worker=place_name(member.worker, rank),
            epoch=member.epoch,
            inventory=translator.inventory,
        )
        publishers.append(publisher)
        translators.append(translator)
        feeds.append(KvFeed(engine, translator, publisher.step, rank=rank or 0))
        caches.append(_device_of(translator))

    def tiers() -> list[int]:
        return [sum(counts) for counts in zip(*(one.held() for one in translators), strict=True)]

    port = publishers[0] if len(publishers) == 1 else RankPublishers(publishers)
    return CacheEvents(port=port, feeds=tuple(feeds), caches=tuple(caches), tiers=tiers)


def _device_of(translator: Translator) -> Callable[[], Container[int]]:
    return lambda: translator.device
