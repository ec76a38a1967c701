"""The composition of one pool's router: the index, its view and follower, the scheduler, and the session around them."""

from __future__ import annotations

import random

from headrace.broker.membership.members import Members
from headrace.broker.models.cards import ModelCard
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects
from headrace.router.index.factory import create_index
from headrace.router.index.view import Caches
from headrace.router.main import Build
from headrace.router.placement.fleets.grid import read_grid
from headrace.router.placement.policies import policy_factory
from headrace.router.placement.scheduler import Scheduler
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.replay.record import Recorder
from headrace.router.replica.deps import ReplicaDeps
from headrace.router.replica.follower import KvFollower
from headrace.router.session.deps import RouterDeps
from headrace.router.session.ports import PoolIndex
from headrace.router.session.session import RouterSession
from headrace.router.settings import RouterOptions


def builder(options: RouterOptions, settings: SchedulerSettings) -> Build:
    """Return the function that `run_router` calls for each pool. It raises SettingsInvalid for an index that cannot be.

    Raises SettingsInvalid for a grid of fleets that cannot be read, or a policy that cannot be loaded.
    """
    policy_factory(settings.policy)  # not only when the first pool appears
    grid = read_grid(options.fleet_grid) if options.fleet_grid is not None else None

    def build(messaging: Messaging, subjects: Subjects, members: Members, card: ModelCard, router: str) -> RouterSession:
        index = create_index(max_entries=options.index_entries)
        view = Caches(index)
        follower = KvFollower(
            ReplicaDeps(
                messaging=messaging,
                subjects=subjects,
                pool=card.pool,
                router=router,
                block_size=card.block_size,
                settings=options.snapshots,
            ),
            view,
            index,
            members=members,
        )
        seed = random.SystemRandom().getrandbits(32)
        scheduler = Scheduler(settings, view, name=router, seed=seed, grid=grid)
        return RouterSession(
            RouterDeps(
                messaging=messaging,
                subjects=subjects,
                members=members,
                pool=card.pool,
                router=router,
                block_size=card.block_size,
                options=options.session,
            ),
            scheduler,
            index=PoolIndex(view, follower.reader.sources, follower, index),
            record=Recorder(messaging, subjects, pool=card.pool, router=router).placed if options.record else None,
        )

    return build
