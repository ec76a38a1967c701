"""Checks the NATS server: version, JetStream limits, sync interval, streams, replicas, permissions and clocks."""

from __future__ import annotations

import re
from collections.abc import Iterator

from headrace.commands.byte_sizes import MIB, size
from headrace.doctor.facts import MonitoringFacts, ServerFacts, StreamFacts
from headrace.doctor.findings import Finding, error, ok, unknown, warning

TESTED = (2, 15)
LEAST_MEMORY = 64 * MIB  # leases and load reports
LEAST_PAYLOAD = MIB
LATE_SYNC_S = 10.0
WRONG_CLOCK_S = 5.0  # deadlines are absolute times
OFF_CLOCK_S = 1.0
NEARLY_FULL = 0.9
LAGGING = 1000  # entries


def check_server(facts: ServerFacts) -> Iterator[Finding]:
    """Yield a finding for each thing that the server must have, or should."""
    yield _version(facts.version)
    yield from _permissions(facts)
    yield from _limits(facts)
    yield _payload(facts)
    yield _sync(facts.monitoring)
    yield _topology(facts)
    yield _replication(facts)
    yield from _peers(facts)
    yield from _nearly_full(facts)
    yield _clock(facts)


def _version(version: str) -> Finding:
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and (int(found[1]), int(found[2])) < TESTED:
        return warning(
            "server.version",
            f"nats-server {version} answers; Headrace is tested with {TESTED[0]}.{TESTED[1]}",
            "use a newer one: versions before 2.14.3 have known ways around permissions",
        )
    return ok("server.version", f"nats-server {version} answers")


def _permissions(facts: ServerFacts) -> Iterator[Finding]:
    if facts.denied:
        yield error(
            "server.permissions",
            f"this login may not use {', '.join(facts.denied)}",
            "give the user these permissions, or ask with the login of an operator; what they would show is not checked here",
        )
    else:
        yield ok("server.permissions", "this login can read all streams and buckets of the deployment")


def _limits(facts: ServerFacts) -> Iterator[Finding]:
    limits = facts.limits
    memory = min((m for m in (limits.memory, facts.monitoring.max_memory if facts.monitoring else -1) if m >= 0), default=-1)
    if 0 <= memory < LEAST_MEMORY:
        yield error(
            "server.memory_store",
            f"JetStream may keep {size(memory)} in memory; leases and load reports are kept there",
            f"set max_memory_store to {size(LEAST_MEMORY)} or more in the jetstream block, or raise the account's limit",
        )
    else:
        yield ok("server.memory_store", f"memory for streams: {size(memory)}, {size(limits.used_memory)} used")
    storage = min((m for m in (limits.storage, facts.monitoring.max_storage if facts.monitoring else -1) if m >= 0), default=-1)
    text = f"disk for streams: {size(storage)}, {size(limits.used_storage)} used"
    if storage >= 0 and limits.used_storage > NEARLY_FULL * storage:
        yield error("server.file_store", text, "raise max_file_store or the account's limit: a full one refuses requests")
    else:
        yield ok("server.file_store", text)
    if 0 <= limits.streams < len(facts.plans):
        yield error(
            "server.streams",
            f"the account may have {limits.streams} streams, the deployment needs {len(facts.plans)}",
            "raise max_streams of the account",
        )


def _payload(facts: ServerFacts) -> Finding:
    text = f"messages may have {size(facts.max_payload)}"
    if facts.max_payload < LEAST_PAYLOAD:
        return error("server.max_payload", text, f"set max_payload to {size(LEAST_PAYLOAD)} or more")
    return ok("server.max_payload", text)


def _sync(monitoring: MonitoringFacts | None) -> Finding:
    check = "server.sync_interval"
    if monitoring is None:
        return unknown(
            check, "the sync interval is only told on the server's monitoring port", "give its address: --monitoring URL"
        )
    every_s = monitoring.sync_interval_s
    text = f"writes reach the disk within {every_s:g} s (sync_interval)" if every_s else "every write is synced to the disk"
    if every_s > LATE_SYNC_S:
        return warning(
            check,
            f"{text}; a power cut loses what is younger",
            f"set sync_interval to {LATE_SYNC_S:g}s or less (`headrace up`: server.sync_interval), or keep three replicas",
        )
    return ok(check, text)


def _topology(facts: ServerFacts) -> Finding:
    check = "deployment.streams"
    missing = [p.stream for p in facts.plans if p.action == "create"]
    different = [p.stream for p in facts.plans if p.action == "update"]
    if missing and len(missing) == len(facts.plans):
        return error(
            check,
            "no stream of this deployment is on the server",
            "start `headrace up` or a part, run `headrace streams apply`, or give the --prefix of the deployment",
        )
    if missing:
        return error(check, f"streams are missing: {', '.join(missing)}", "headrace streams apply")
    if different:
        return warning(check, f"streams differ from this version: {', '.join(different)}", "headrace streams plan shows how")
    return ok(check, f"all {len(facts.plans)} streams, buckets and stores are as they should be")


def _replication(facts: ServerFacts) -> Finding:
    single = [s for s in facts.streams if s.replicas < 2 and not s.one_copy]
    double = [s.name for s in facts.streams if s.replicas == 2]
    if not facts.cluster:
        return ok("server.replication", "a single server: its disk is the only copy of what is stored")
    if single:
        return warning(
            "server.replication",
            f"{len(single)} streams have one copy in the cluster {facts.cluster}",
            "the loss of one server loses them: `headrace streams apply --nats-replicas 3` keeps three",
        )
    if double:
        return warning(
            "server.replication",
            f"two copies in the cluster {facts.cluster} have {', '.join(double)}: they stop when one server is away",
            "`headrace streams apply --nats-replicas 3` keeps three",
        )
    return ok("server.replication", f"every stream has copies in the cluster {facts.cluster}")


def _peers(facts: ServerFacts) -> Iterator[Finding]:
    for stream in facts.streams:
        if not stream.peers:
            continue
        yield from _stream_peers(stream)
        lacking = [c.name for c in stream.consumers if 0 < c.copies < stream.replicas]
        if lacking:
            yield error(
                "server.peers",
                f"{stream.name}: not on all servers of the stream are its consumers {', '.join(lacking)}",
                "wait if copies were just added; else delete them: parts make them again",
            )


def _stream_peers(stream: StreamFacts) -> Iterator[Finding]:
    gone = [peer.name for peer in stream.peers if peer.offline]
    behind = [peer.name for peer in stream.peers if not peer.offline and (not peer.current or peer.lag > LAGGING)]
    if not stream.leader:
        yield error("server.peers", f"{stream.name} has no leader: it takes no message", "start the servers that are down")
    if gone:
        yield error("server.peers", f"{stream.name}: no contact to {', '.join(gone)}", "start the server, or remove the peer")
    if behind:
        yield warning("server.peers", f"{stream.name}: {', '.join(behind)} is not current", "wait, or look at its disk")


def _nearly_full(facts: ServerFacts) -> Iterator[Finding]:
    for stream in facts.streams:
        if stream.max_bytes > 0 and stream.bytes > NEARLY_FULL * stream.max_bytes:
            yield warning(
                "deployment.stream_bytes",
                f"{stream.name} has {size(stream.bytes)} of {size(stream.max_bytes)}",
                "queues refuse when they are full, logs drop their oldest: headrace streams status",
            )


def _clock(facts: ServerFacts) -> Finding:
    check = "server.clock"
    if facts.skew_s is None:
        return unknown(check, "the server told no time")
    least_s = max(0.0, abs(facts.skew_s) - facts.skew_bound_s)
    way = "ahead of" if facts.skew_s > 0 else "behind"
    text = f"the server's clock is {abs(facts.skew_s):.2f} s {way} this machine's"
    if least_s > WRONG_CLOCK_S:
        return error(check, text, "deadlines are absolute times: set both clocks by NTP")
    if least_s > OFF_CLOCK_S:
        return warning(check, text, "set both clocks by NTP")
    return ok(check, f"the server's clock and this machine's differ by at most {abs(facts.skew_s) + facts.skew_bound_s:.2f} s")
