"""Each server that a message passed is a span, below the one that sent the message on."""

from __future__ import annotations

from headrace.frontend.tracing import names
from headrace.frontend.tracing.context import TraceContext
from headrace.frontend.tracing.path_spans import spans_of_path
from headrace.jetstream.message_traces import Hop

CONTEXT = TraceContext(7, 1, True)


def test_a_hop_below_another_one_is_its_child_and_all_else_is_below_the_request() -> None:
    hops = [
        Hop("r.1", "", "n1", 1.0, 1.5, "hr.req.p.std._", "HR_PARTS", "headrace-frontend", onward=1),
        Hop("r.1", "1", "n2", 1.25, 2.0, "hr.req.p.std._", "HR_PARTS", stream="HR_REQ"),
        Hop("r.1@9", "", "n2", 3.0, 3.5, "hr.work.p.w", stream="HR_WORK", error="msgid is duplicate"),
    ]
    first, second, third = spans_of_path(hops, "r", CONTEXT, 5)
    assert [span.name for span in (first, second, third)] == ["forward", "store HR_REQ", "store HR_WORK"]
    assert [span.parent for span in (first, second, third)] == [5, first.id, 5]
    assert {span.trace for span in (first, second, third)} == {7}
    assert [(span.service, span.instance) for span in (first, second)] == [("nats-server", "n1"), ("nats-server", "n2")]
    assert (second.begin_ns, second.end_ns) == (1_250_000_000, 2_000_000_000)
    assert first.attributes == {
        names.REQUEST_ID: "r",
        names.MESSAGING_SYSTEM: "nats",
        names.MESSAGING_DESTINATION: "hr.req.p.std._",
        names.MESSAGE_ID: "r.1",
        names.NATS_ACCOUNT: "HR_PARTS",
        names.NATS_SENDER: "headrace-frontend",
        names.NATS_ONWARD: 1,
    }
    assert (third.attributes[names.NATS_ERROR], third.error) == ("msgid is duplicate", "")


def test_a_hop_whose_sender_told_nothing_is_below_the_request() -> None:
    (span,) = spans_of_path([Hop("r.1", "2.1", "n3", 1.0, 1.0)], "r", CONTEXT, 5)
    assert span.parent == 5
