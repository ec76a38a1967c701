"""Builds what writes the audit stream, and makes the stream, where the settings ask for it."""

from __future__ import annotations

from headrace.frontend.metrics import Metrics
from headrace.frontend.request_audit.policy import AuditPolicy, read_patterns
from headrace.frontend.request_audit.writer import AuditWriter
from headrace.frontend.settings import FrontendSettings
from headrace.jetstream.client import Connection
from headrace.jetstream.provision import ensure_on_demand
from headrace.jetstream.topology import Topology


async def audit_writer(
    connection: Connection, topology: Topology, settings: FrontendSettings, metrics: Metrics, *, frontend: str
) -> AuditWriter | None:
    """Return the writer of a frontend, None where nothing is to be recorded. Raises AuditUnusable, TopologyError."""
    if settings.audit == "off":
        return None
    policy = AuditPolicy(
        frontend,
        content=settings.audit == "content",
        patterns=read_patterns(settings.audit_redact),
        left_out=settings.audit_leave_out,
    )
    await ensure_on_demand(connection, topology.audit())
    return AuditWriter(connection, topology.subjects, policy, metrics)
