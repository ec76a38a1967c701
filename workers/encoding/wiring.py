"""Wires a worker's part in encoding media apart: the encoder of an encode worker, or what a serving worker gets from such."""

from __future__ import annotations

from headrace.broker.worker.ports import HandoverSession
from headrace.jetstream.client import Connection
from headrace.jetstream.ports import Messaging
from headrace.jetstream.provision import ensure_on_demand
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology
from headrace.workers.encoding.server import EncodeServer
from headrace.workers.encoding.source import EmbeddingSource, SourceDeps
from headrace.workers.engine import Engine, EngineInfo, MediaEncoder
from headrace.workers.errors import EngineStartFailed
from headrace.workers.settings import WorkerSettings


def encode_server(
    settings: WorkerSettings, engine: Engine, info: EngineInfo, messaging: Messaging, subjects: Subjects, pool: str
) -> EncodeServer | None:
    """Create the server of an encode worker, None for other roles. Raises EngineStartFailed for an engine without encoder."""
    if settings.role != "encode":
        return None
    if not info.encoder or not isinstance(engine, MediaEncoder):
        raise EngineStartFailed(f"engine {settings.engine!r} encodes no media for others: it cannot serve in the role 'encode'")
    return EncodeServer(engine, info.encoder, messaging, subjects, pool=pool)


async def make_store(connection: Connection, subjects: Subjects, info: EngineInfo, pool: str) -> None:
    """Make the object store of embeddings if this worker has a use for it and it is missing. Raises a JetStreamError."""
    if info.encoder:
        await ensure_on_demand(connection, Topology(subjects).embeddings(pool))


def embedding_source(
    settings: WorkerSettings, info: EngineInfo, session: HandoverSession, messaging: Messaging, subjects: Subjects
) -> EmbeddingSource | None:
    """Create the source of a serving worker, or return None if its engine takes no embeddings."""
    if settings.role == "encode" or not info.encoder:
        return None

    def encoders() -> list[str]:
        return [member.worker for member in session.members.encode_workers(session.state.pool, info.encoder)]

    return EmbeddingSource(
        SourceDeps(
            messaging=messaging,
            subjects=subjects,
            pool=session.state.pool,
            encoder=info.encoder,
            encoders=encoders,
            wait_s=settings.encode_wait_s,
        )
    )
