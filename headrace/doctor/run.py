"""Runs `headrace doctor`: reads this machine, the NATS server and the deployment, checks them, and prints what is wrong."""

from __future__ import annotations

import sys
from pathlib import Path

from headrace.base import logs
from headrace.base.errors import EXIT_UNAVAILABLE, StartFailed
from headrace.commands.operating.control_client import connected
from headrace.config.settings import Settings
from headrace.doctor.deployment_checks import check_deployment
from headrace.doctor.deployment_facts import read_deployment
from headrace.doctor.facts import DeploymentFacts, ServerFacts
from headrace.doctor.findings import SERVER_UNREACHABLE, Finding, error, exit_code, unknown
from headrace.doctor.machine_checks import check_machine
from headrace.doctor.machine_facts import read_machine
from headrace.doctor.report import as_json, as_text
from headrace.doctor.server_checks import check_server
from headrace.doctor.server_facts import embedded_monitoring, read_server
from headrace.jetstream.client import Connection
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology


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
