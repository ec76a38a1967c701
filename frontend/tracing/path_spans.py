"""Turns the paths of a sampled request's messages through nats-servers into spans: one per message and server."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.frontend.tracing import names
from headrace.frontend.tracing.context import TraceContext, new_span_id
from headrace.frontend.tracing.spans import NS, SpanData, Value
from headrace.jetstream.message_traces import Hop


def spans_of_path(hops: Sequence[Hop], request: str, context: TraceContext, root: int) -> list[SpanData]:
    """Return a span per hop: below `root`, or below the hop of the server that sent the message on.

    A span reaches from a server's getting the message to its having stored it, or sent it on, by that server's clock.
    """
    ids = {(hop.message, hop.place): new_span_id() for hop in hops}
    made: list[SpanData] = []
    for hop in hops:
        about: dict[str, Value] = {
            names.REQUEST_ID: request,
            names.MESSAGING_SYSTEM: "nats",
            names.MESSAGING_DESTINATION: hop.subject,
            names.MESSAGE_ID: hop.message,
            names.NATS_ACCOUNT: hop.account,
        }
        if hop.stream:
            about[names.NATS_STREAM] = hop.stream
        if hop.sender:
            about[names.NATS_SENDER] = hop.sender
        if hop.onward:
            about[names.NATS_ONWARD] = hop.onward
        if hop.error:
            about[names.NATS_ERROR] = hop.error  # a repeated publish is one too, so the span has not failed
        parent = ids.get((hop.message, hop.place.rpartition(".")[0])) if hop.place else None
        made.append(
            SpanData(
                name=f"store {hop.stream}" if hop.stream else "forward",
                trace=context.trace,
                id=ids[hop.message, hop.place],
                parent=parent or root,
                begin_ns=int(hop.came_s * NS),
                end_ns=int(hop.went_s * NS),
                service="nats-server",
                instance=hop.server,
                attributes=about,
            )
        )
    return made
