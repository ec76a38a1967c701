"""The paths of a sampled request's messages through nats-server: who asks for them, and the ingress that collects them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headrace.broker import metrics
from headrace.jetstream.message_traces import Hop, ask_for_trace, read_hop
from headrace.jetstream.ports import Message
from headrace.jetstream.subjects import Subjects

MOST_REQUESTS = 1024  # with hops that no one has taken yet
MOST_HOPS = 32  # of one request


def path_headers(subjects: Subjects, trace: Mapping[str, str], judge: str) -> dict[str, str]:
    """Return the headers that have the path of a request's message told to its judge; none if the request is not sampled."""
    if not trace or not trace.get("traceparent", "").endswith("-01"):
        return {}
    return ask_for_trace(subjects.hops(judge))


class MessagePaths:
    """The hops of the sampled requests of one ingress, until they are taken. What is too much is dropped and counted."""

    def __init__(self, known: Callable[[str], bool]) -> None:
        """`known`: whether a request with this id is open here, or ended a moment ago."""
        self._known = known
        self._hops: dict[str, list[Hop]] = {}

    def __len__(self) -> int:
        return len(self._hops)

    def on_hop(self, message: Message) -> None:
        """Note what a server tells of a message of a request of this ingress."""
        hop = read_hop(message.data)
        if hop is None:
            metrics.MALFORMED.labels("hop").inc()
            return
        request = request_of(hop.message)
        if not self._known(request):
            metrics.HOPS_DROPPED.inc()
            return
        hops = self._hops.setdefault(request, [])
        if len(hops) >= MOST_HOPS:
            metrics.HOPS_DROPPED.inc()
            return
        hops.append(hop)
        if len(self._hops) > MOST_REQUESTS:
            metrics.HOPS_DROPPED.inc(len(self._hops.pop(next(iter(self._hops)))))

    def take(self, request: str) -> list[Hop]:
        """Return the hops of a request in the order in which servers got its messages, and forget them."""
        return sorted(self._hops.pop(request, ()), key=lambda hop: (hop.came_s, hop.place))


def request_of(message_id: str) -> str:
    """Return the id of the request in the id of one of its messages: `<request>.<attempt>` and, behind an @, its source."""
    return message_id.partition("@")[0].rpartition(".")[0]
