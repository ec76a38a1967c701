"""Records of placements, from which another policy can be replayed later.

They are sent without waiting for an ack: a lost record costs nothing, and waiting for one would delay a request.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from headrace.broker.codec import encode
from headrace.broker.messages import Routed
from headrace.jetstream.errors import PayloadTooLarge
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects
from headrace.router.placement.types import Placement
from headrace.router.session.held_request import HeldRequest

MAX_HASHES = 2048  # 16 KiB a record at most
_HASH_BYTES = 8


class Recorder:
    """Sends the records of one router in one pool. `placed` is made for the `record` of a session."""

    def __init__(
        self, messaging: Messaging, subjects: Subjects, *, pool: str, router: str, wall: Callable[[], float] = time.time
    ) -> None:
        self._messaging = messaging
        self._subject = subjects.route(pool)
        self._router = router
        self._wall = wall

    def placed(self, held: HeldRequest, placement: Placement) -> None:
        """Send the record of a placement. Never raises."""
        head = held.head
        routed = Routed(
            at=self._wall(),
            id=held.id,
            attempt=held.attempt,
            router=self._router,
            worker=placement.worker,
            reason=placement.reason,
            tokens=head.tokens,
            max_tokens=head.max_tokens,
            uncached=placement.uncached,
            waited_s=placement.waited_s,
            predicted_ttft_s=placement.predicted_ttft_s,
            tenant=head.tenant,
            request_class=held.request_class,
            priority=head.priority,
            block_size=head.block_size,
            blocks=len(head.hashes) // _HASH_BYTES,
            hashes=head.hashes[: MAX_HASHES * _HASH_BYTES],
            adapter=head.adapter,
            session=head.session,
            prefill=placement.prefill,
            fleet=placement.fleet.fleet if placement.fleet is not None else "",
            fleet_reason=placement.fleet.reason if placement.fleet is not None else "",
            ttft_target_s=head.ttft_target_s,
            itl_target_s=head.itl_target_s,
        )
        try:
            self._messaging.send(self._subject, encode(routed))
        except PayloadTooLarge:  # of a server with a tiny limit
            return
