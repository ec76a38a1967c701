"""Puts one pool's router together: index, its view, what keeps it current, the scheduler, and the session around them."""

from __future__ import annotations

import random

from headrace.broker.membership.members import Members
from headrace.broker.models.cards import ModelCard
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects
from headrace.router.index.factory import create_index
from headrace.router.index.view import Caches
from headrace.router.main import Build
from headrace.router.placement.scheduler import Scheduler
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.replay.record import Recorder
from headrace.router.replica.follower import KvFollower
from headrace.router.session.session import RouterSession
from headrace.router.settings import RouterOptions


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
