"""How xdist hands the tests out: see `process_shares`."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling

from tests.support.process_shares import share_of


class SharedScheduling(LoadFileScheduling):
    """As for files; a unit of work is what has to run in one process."""

    def _split_scope(self, nodeid: str) -> str:
        return share_of(nodeid)
