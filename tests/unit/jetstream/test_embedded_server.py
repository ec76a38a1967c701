"""What a nats-server says about its health is read as: healthy, serving without some streams, or not serving."""

from __future__ import annotations

import pytest

from headrace.jetstream.embedded_server import parse_health, read_health, streams_left_out


def stream_error(name: str) -> dict[str, str]:
    return {
        "type": "STREAM",
        "account": "$G",
        "stream": name,
        "error": f"JetStream stream '$G > {name}' could not be recovered",
    }


def test_a_healthy_server_serves() -> None:
    health = parse_health(200, {})
    assert (health.ok, health.serves, health.damaged) == (True, True, ())


def test_a_server_that_lacks_streams_serves_and_names_them() -> None:
    health = parse_health(503, {"status": "error", "errors": [stream_error("B"), stream_error("A")]})
    assert (health.ok, health.serves, health.damaged) == (False, True, ("A", "B"))


def test_a_write_error_is_told_from_a_server_that_does_not_serve() -> None:
    error = "JetStream stream '$G > HR_RSP' write error: write /s/HR_RSP/msgs/1.blk: no space left on device"
    met = {"type": "STREAM", "account": "$G", "stream": "HR_RSP", "error": error}
    health = parse_health(503, {"status": "error", "errors": [met, stream_error("A")]})
    assert (health.ok, health.serves, health.unwritable, health.damaged) == (False, True, ("HR_RSP",), ("A",))


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"status": "unavailable", "error": "JetStream is not enabled"}, "JetStream is not enabled"),
        ({"status": "error", "errors": [stream_error("A"), {"type": "CONNECTION", "error": "no clients"}]}, "no clients"),
        (
            {"status": "error", "errors": [{"type": "STREAM", "stream": "A", "error": "stream not current"}]},
            "stream not current",
        ),
        ({}, "HTTP 503"),
    ],
)
def test_any_other_error_is_no_service(body: dict[str, object], problem: str) -> None:
    health = parse_health(503, body)
    assert (health.ok, health.serves) == (False, False)
    assert problem in health.problem


def test_a_server_that_does_not_answer_does_not_serve() -> None:
    health = read_health("http://127.0.0.1:9")
    assert not health.serves
    assert health.problem


def test_streams_that_are_left_out_are_told_by_the_log() -> None:
    lines = [
        '[7] 2026/11/27 04:39:28.022712 [WRN]   Error recreating stream "HR_WORK": corrupt state file (10077)',
        "[7] 2026/11/27 04:39:28.022747 [INF] Took 40.395609ms to start JetStream",
    ]
    assert streams_left_out(lines) == ("HR_WORK",)
    assert streams_left_out(lines[1:]) == ()
