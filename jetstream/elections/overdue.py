"""Decides which raft groups are to elect now: those whose leader is gone, and which can elect.

A group is called once when its servers still name the dead one as their leader. An earlier elector, or the group itself, has
cleared that name; then the group is left alone for as long as an election takes, and called again if it still has no leader.
Two candidates that have voted for themselves at the same time are called again at once: they would otherwise wait for their
timers, and among twenty groups there are such.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from headrace.jetstream.elections.raft_groups import LEADER, RaftGroup

AGAIN_S = 1.2  # candidates begin 0.1 to 0.8 s after a call
SPLIT_AGAIN_S = 0.15
CALLS = 10  # of one group, until it has had a leader

# What each server that answered has said of its groups.
Answers = Mapping[str, Mapping[str, RaftGroup]]


@dataclass(frozen=True, slots=True)
class Call:
    """An election to be called: of this group, in this term."""

    group: str
    term: int


@dataclass(slots=True)
class _Waiting:
    since: float  # without a leader, or called
    calls: int = 0


class Overdue:
    """The groups without a leader, and when each was last called."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Waiting] = {}

    @property
    def leaderless(self) -> int:
        """The number of groups that had no leader when last looked at."""
        return len(self._waiting)

    def due(self, now: float, answers: Answers, gone: Collection[str]) -> list[Call]:
        """Return the elections to be called now. `gone`: the names of the servers that do not answer."""
        calls = []
        seen: dict[str, list[RaftGroup]] = {}
        for groups in answers.values():
            for name, group in groups.items():
                seen.setdefault(name, []).append(group)
        for name, views in seen.items():
            if self._is_due(name, views, now, gone):
                calls.append(Call(name, 1 + max(view.term for view in views)))
        for name in self._waiting.keys() - seen.keys():
            del self._waiting[name]
        return calls

    def _is_due(self, name: str, views: list[RaftGroup], now: float, gone: Collection[str]) -> bool:
        leaders = {view.leader_name for view in views if view.leader}
        lives = any(view.state == LEADER for view in views) or not leaders <= set(gone)
        if lives or len(views) < max(view.quorum_needed for view in views) or not all(map(_can_be_asked, views)):
            self._waiting.pop(name, None)
            return False
        waiting = self._waiting.setdefault(name, _Waiting(now))
        first = not waiting.calls and all(view.leader for view in views)
        rest_s = SPLIT_AGAIN_S if _is_split(views) else AGAIN_S
        if not first and (now - waiting.since < rest_s or waiting.calls >= CALLS):
            return False
        waiting.since, waiting.calls = now, waiting.calls + 1
        return True


def _is_split(views: list[RaftGroup]) -> bool:
    """Return True if all have voted in one term, and no candidate can have enough votes."""
    votes = Counter(view.voted_for for view in views)
    return (
        len({view.term for view in views}) == 1
        and "" not in votes
        and not any(view.leader for view in views)
        and max(votes.values()) < max(view.quorum_needed for view in views)
    )


def _can_be_asked(view: RaftGroup) -> bool:
    """Return False for a group whose messages are in an account of its own, where no other one may send."""
    return not view.traffic_account or view.system_account
