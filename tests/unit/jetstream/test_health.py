"""The metrics of streams are sums per stream, and tell only of those that were just read."""

from __future__ import annotations

from headrace.jetstream.health import exposition
from headrace.jetstream.provision import ConsumerStatus, StreamStatus


def consumer(name: str, waiting: int, pending: int) -> ConsumerStatus:
    return ConsumerStatus(name=name, waiting_messages=waiting, ack_pending=pending, redelivered=1, open_pulls=0)


def test_consumers_are_summed_and_not_named() -> None:
    stream = StreamStatus(
        stream="HR_WORK",
        exists=True,
        messages=9,
        bytes=90,
        oldest_age_s=1.5,
        consumers=(consumer("a", 2, 3), consumer("b", 4, 5)),
    )
    lines = exposition([stream]).decode().splitlines()
    for name, value in (("messages", 9), ("bytes", 90), ("oldest_seconds", 1.5), ("consumers", 2), ("undelivered", 6)):
        assert f'headrace_stream_{name}{{stream="HR_WORK"}} {float(value)}' in lines
    assert 'headrace_stream_unacknowledged{stream="HR_WORK"} 8.0' in lines
    assert 'headrace_stream_redelivered{stream="HR_WORK"} 2.0' in lines
    assert all(line.startswith(("#", "headrace_stream_")) for line in lines)


def test_a_stream_that_is_gone_is_missing_and_has_no_depth() -> None:
    exposition([StreamStatus(stream="HR_REQ", exists=True, messages=3)])
    text = exposition([StreamStatus(stream="HR_REQ", exists=False)]).decode()
    assert 'headrace_stream_missing{stream="HR_REQ"} 1.0' in text
    assert "headrace_stream_messages{" not in text
