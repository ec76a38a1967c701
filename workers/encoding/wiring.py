"""Wires a worker's part in encoding media apart: the encoder of an encode worker, or what a serving worker gets from such."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

import structlog

from headrace.broker.messages.members import WorkerMember
from headrace.broker.worker.session import WorkerSession
from headrace.jetstream.client import Connection
from headrace.jetstream.ports import Messaging
from headrace.jetstream.provision import ensure_on_demand
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology
from headrace.workers.blocking import run_in_thread
from headrace.workers.encoding.server import EncodeServer
from headrace.workers.encoding.source import EmbeddingSource, SourceDeps
from headrace.workers.engine import Engine, EngineInfo, MediaEncoder
from headrace.workers.errors import EngineStartFailed, TransferFailed
from headrace.workers.settings import WorkerSettings

if TYPE_CHECKING:
    from headrace.workers.encoding.lending import LentMemory, RecordReader

log = structlog.get_logger()

Made = TypeVar("Made")


class NixlPart(Protocol):
    """A worker's memory for embeddings, which is closed when `run` is cancelled."""

    async def run(self) -> None: ...


async def lent_memory(settings: WorkerSettings, worker: str) -> LentMemory | None:
    """Make the memory that an encode worker lends; None for other roles, and where NIXL is switched off or not there."""
    least_bytes = settings.encode_nixl_bytes
    if settings.role != "encode" or not least_bytes:
        return None

    def make() -> LentMemory:
        from headrace.workers.encoding.lending import LentMemory

        return LentMemory(worker, least_bytes=least_bytes)

    return await _with_nixl(make)


async def record_reader(settings: WorkerSettings, info: EngineInfo, worker: str) -> RecordReader | None:
    """Make the reader of a worker whose engine takes embeddings; None for others, and as above."""
    if settings.role == "encode" or not info.encoder or not settings.encode_nixl_bytes:
        return None

    def make() -> RecordReader:
        from headrace.workers.encoding.lending import RecordReader

        return RecordReader(worker)

    return await _with_nixl(make)


async def _with_nixl(make: Callable[[], Made]) -> Made | None:
    try:
        return await run_in_thread(make, name="embeddings-memory")
    except (EngineStartFailed, TransferFailed) as error:
        log.warning("embeddings.without_nixl", error=str(error), meaning="embeddings of media go by the object store alone")
        return None


def encode_server(
    settings: WorkerSettings,
    engine: Engine,
    info: EngineInfo,
    messaging: Messaging,
    subjects: Subjects,
    member: WorkerMember,
    lending: LentMemory | None,
) -> EncodeServer | None:
    """Create the server of an encode worker, None for other roles. Raises EngineStartFailed for an engine without encoder."""
    if settings.role != "encode":
        return None
    if not info.encoder or not isinstance(engine, MediaEncoder):
        raise EngineStartFailed(f"engine {settings.engine!r} encodes no media for others: it cannot serve in the role 'encode'")
    return EncodeServer(engine, info.encoder, messaging, subjects, pool=member.pool, lending=lending)


async def make_store(connection: Connection, subjects: Subjects, info: EngineInfo, pool: str) -> None:
    """Make the object store of embeddings if this worker has a use for it and it is missing. Raises a JetStreamError."""
    if info.encoder:
        await ensure_on_demand(connection, Topology(subjects).embeddings(pool))


def embedding_source(
    settings: WorkerSettings,
    info: EngineInfo,
    session: WorkerSession,
    messaging: Messaging,
    subjects: Subjects,
    reader: RecordReader | None,
) -> EmbeddingSource | None:
    """Create the source of a serving worker, or return None if its engine takes no embeddings."""
    if settings.role == "encode" or not info.encoder:
        return None

    def encoders() -> list[str]:
        return [member.worker for member in session.presence.members.encode_workers(session.presence.pool, info.encoder)]

    return EmbeddingSource(
        SourceDeps(
            messaging=messaging,
            subjects=subjects,
            pool=session.presence.pool,
            encoder=info.encoder,
            encoders=encoders,
            wait_s=settings.encode_wait_s,
            reader=reader,
        )
    )
