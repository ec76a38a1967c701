"""Defines what a planner wants done, and orders the ways to more workers by what they cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from headrace.planner.observation import ROLES, Observation, WorkerSight
from headrace.planner.redistribution import victims

ActionKind = Literal["role", "wake", "start", "drain"]


class Action(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A step towards the wanted numbers. `worker` is empty for a start.

    `role` is the role that it shall have, of a drain the one that it has.
    """

    kind: ActionKind
    role: str
    worker: str = ""


def actions_for(observation: Observation, change: Mapping[str, int]) -> list[Action]:
    """Return how to change the numbers of workers by role by `change`: roles first, then sleepers, then starts; drains last.

    A worker that is to go and can take a role in which one is missing changes it instead: seconds, and no start.
    """
    missing = {role: change.get(role, 0) for role in ROLES if change.get(role, 0) > 0}
    leaving: list[WorkerSight] = []
    for role in ROLES:
        if change.get(role, 0) < 0:
            leaving += victims(observation.of_role(role), -change[role])
    actions: list[Action] = []
    for role in missing:
        for worker in [one for one in leaving if role in one.roles]:
            if missing[role] and worker in leaving:
                actions.append(Action(kind="role", role=role, worker=worker.worker))
                leaving.remove(worker)
                missing[role] -= 1
    for role in missing:
        asleep = sorted(observation.of_role(role, "asleep"), key=lambda one: one.worker)[: missing[role]]
        actions += [Action(kind="wake", role=role, worker=one.worker) for one in asleep]
        actions += [Action(kind="start", role=role)] * (missing[role] - len(asleep))
    return [*actions, *(Action(kind="drain", role=one.role, worker=one.worker) for one in leaving)]
