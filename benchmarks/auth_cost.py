"""Measures the CPU of the gate per request: with nothing in force, with keys, and with keys and quotas.

Quotas count the request, reserve and settle its tokens, and write the rate limit headers of its answer. The rounds that share
the counts between frontends are not in it: they cost per key and quarter of a second, not per request.

    python -m benchmarks.auth_cost [--requests 20000] [--rounds 7]
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from headrace.broker.codec import encode
from headrace.broker.keys import CLIENT_SCOPES, KeyHash, KeyRecord, Limits, digest_of, new_key_id, new_key_text
from headrace.frontend.auth.gate import Gate
from headrace.frontend.auth.key_ring import KeyRing
from headrace.frontend.settings import FrontendSettings
from headrace.jetstream.ports import Change

KEYS = 1000  # in the ring
LIMITS = Limits(requests_per_minute=10**9, tokens_per_minute=10**12, concurrent=10**6, tokens_per_day=10**13)


def filled_ring(limits: Limits) -> tuple[KeyRing, str]:
    """Return a ring with many keys, and the text of one of them."""
    ring, text = KeyRing(FrontendSettings()), ""
    rebuild, ring._rebuild = ring._rebuild, lambda: None  # type: ignore[method-assign]
    for number in range(KEYS):
        key_id = new_key_id()
        text = new_key_text(key_id)
        record = KeyRecord(
            id=key_id,
            name=f"k{number}",
            tenant=f"t{number % 50}",
            hashes=[KeyHash(sha256=digest_of(text.encode()))],
            scopes=list(CLIENT_SCOPES),
            created=1.0,
            limits=limits,
            tenant_limits=limits,
        )
        ring.apply(Change(key_id, encode(record), number + 1))
    rebuild()
    return ring, text


def scope(key: str | None) -> dict[str, Any]:
    """Return the request of an openai client."""
    headers = [
        (b"host", b"127.0.0.1:8000"),
        (b"accept-encoding", b"gzip, deflate"),
        (b"connection", b"keep-alive"),
        (b"accept", b"application/json"),
        (b"content-type", b"application/json"),
        (b"user-agent", b"AsyncOpenAI/Python 2.1.0"),
        (b"x-stainless-lang", b"python"),
        (b"x-stainless-os", b"Linux"),
        (b"x-stainless-arch", b"x64"),
        (b"x-stainless-retry-count", b"0"),
        (b"content-length", b"120"),
    ]
    if key is not None:
        headers.append((b"authorization", f"Bearer {key}".encode()))
    return {"type": "http", "method": "POST", "path": "/v1/chat/completions", "http_version": "1.1", "headers": headers}


def cost_us(gate: Gate, key: str | None, *, requests: int) -> float:
    """Return the CPU of one request in microseconds."""
    scopes = [scope(key) for _ in range(requests)]
    began = time.process_time()
    for each in scopes:
        gate.admit(each)
        hold = each.get("headrace.hold")
        if hold is not None:
            hold.reserve(100, 64)
            hold.header_lines(anthropic=False)
            hold.settle(140)
            hold.leave()
    return (time.process_time() - began) / requests * 1e6


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000, help="of each kind in each round")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    keyed, key = filled_ring(Limits())
    metered, metered_key = filled_ring(LIMITS)
    kinds = {
        "no keys: host, origin, content type": (Gate(FrontendSettings(), KeyRing(FrontendSettings())), None),
        "a key": (Gate(FrontendSettings(), keyed), key),
        "a key, quotas of key and tenant": (Gate(FrontendSettings(), metered), metered_key),
    }
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(options.rounds):
        for name, (gate, text) in kinds.items():
            found[name].append(cost_us(gate, text, requests=options.requests))
    for name, costs in found.items():
        print(f"{name:<40} {statistics.median(costs):6.2f} µs  (least {min(costs):.2f})")


if __name__ == "__main__":
    main()
