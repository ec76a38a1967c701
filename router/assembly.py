"""Puts one pool's router together: index, its view, what keeps it current, the scheduler, and the session around them."""

from __future__ import annotations

import random

from broker.cards import ModelCard
from broker.members import Members
from jetstream.ports import Messaging
from jetstream.subjects import Subjects
from router.feed.follow import KvFollower
from router.index.create import create_index
from router.index.view import Caches
from router.main import Build
from router.options import RouterOptions
from router.placement.scheduler import Scheduler
from router.placement.settings import SchedulerSettings
from router.replay.record import Recorder
from router.session.session import RouterSession


def builder(options: RouterOptions, settings: SchedulerSettings) -> Build:
    """What `run_router` calls for each pool. Raises SettingsInvalid for an index that cannot be."""

    def build(messaging: Messaging, subjects: Subjects, members: Members, card: ModelCard, router: str) -> RouterSession:
        index = create_index(max_entries=options.index_entries)
        view = Caches(index)
        follower = KvFollower(
            messaging,
            subjects,
            card.pool,
            view,
            index,
            router=router,
            block_size=card.block_size,
            members=members,
            settings=options.snapshots,
        )
        seed = random.SystemRandom().getrandbits(32)
        scheduler = Scheduler(settings, view, name=router, seed=seed)
        return RouterSession(
            messaging,
            subjects,
            card.pool,
            scheduler,
            router=router,
            members=members,
            view=view,
            caches=follower.feed,
            feed=follower,
            index_size=lambda: len(index),
            prefill_queue=scheduler.apart.pool.queued_tokens,
            record=Recorder(messaging, subjects, pool=card.pool, router=router).placed if options.record else None,
            options=options.session,
        )

    return build
