"""Runs `headrace planner`: one connection, one page, until a signal."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import structlog

from headrace.base.errors import SettingsError, StartFailed
from headrace.base.process import stop_signals
from headrace.broker.part_state import PartState
from headrace.commands.operating.control import live_workers
from headrace.commands.run import run_part, start_part
from headrace.config.build_settings import connect_options, planner_settings, subjects
from headrace.config.planner_settings import PlannerSettings
from headrace.config.settings import Settings
from headrace.jetstream.connect import connect_patiently
from headrace.jetstream.context import ConnectOptions
from headrace.jetstream.subjects import Subjects
from headrace.planner.actuators import Actuator, CommandStarter, Starter, SupervisorStarter
from headrace.planner.desired_page import DesiredPage, serve_page
from headrace.planner.kubernetes.api import KubernetesApi
from headrace.planner.kubernetes.scaler import KubernetesScaler
from headrace.planner.planner_process import PlannerProcess
from headrace.planner.speed_curve import Speed
from headrace.planner.statsforecast_models import statsforecast_models
from headrace.up.worker_control import socket_of

log = structlog.get_logger()

CONNECT_S = 30.0
FRESH_TICKS = 6.0


def run_planner_command(settings: Settings) -> int:
    """Run `headrace planner`. Raises SettingsError."""
    start_part(settings, {"component": "planner"})
    options = connect_options(settings, name="headrace planner")
    chosen = planner_settings(settings)
    profile = read_profile(chosen.profile)
    statsforecast_models(chosen.forecasters)  # what is not installed is said now
    socket = socket_of(Path(settings["data_dir"]).resolve())

    api = KubernetesApi.of_this_pod() if chosen.kubernetes else None

    def start() -> Coroutine[Any, Any, int | None]:
        return run_planner(chosen, options, subjects(settings), starter=_starter(chosen, socket), api=api, profile=profile)

    return run_part(settings, start)


def read_profile(path: str | None) -> dict[str, Speed] | None:
    """Read measured speeds, role → base_s, prefill_s, decode_s, context_s. Raises SettingsError for a file that has none."""
    if not path:
        return None
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=dict[str, Speed])
    except (OSError, msgspec.MsgspecError) as error:
        raise SettingsError(f"planner.profile: {path} cannot be used: {error}") from error


def _starter(settings: PlannerSettings, socket: Path) -> Starter | None:
    if settings.start_command:
        return CommandStarter(settings.start_command)
    return SupervisorStarter(str(socket)) if socket.exists() else None


async def run_planner(
    settings: PlannerSettings,
    connect: ConnectOptions,
    names: Subjects,
    *,
    starter: Starter | None,
    api: KubernetesApi | None = None,
    profile: dict[str, Speed] | None = None,
) -> None:
    """Plan until SIGTERM or SIGINT. With an `api` Kubernetes starts and stops workers, else `starter` starts them.

    Raises StartFailed, and the ConnectError family if NATS cannot be used."""
    state, stopping = PartState("planner"), asyncio.Event()
    page = DesiredPage(fresh_s=max(30.0, FRESH_TICKS * settings.tick_s))
    try:
        port = serve_page(settings.host, settings.port, page, state)
    except OSError as error:
        raise StartFailed(f"port {settings.port} of {settings.host} cannot be used: {error}") from error
    log.info("planner.listening", host=settings.host, port=port, mode=settings.mode)
    async with await connect_patiently(connect, subjects=names, timeout_s=CONNECT_S) as connection:
        scaler = KubernetesScaler(api, partial(live_workers, connection, names)) if api is not None else None
        actuator = Actuator(connection, names, scaler or starter, scaler) if settings.mode == "act" else None
        process = PlannerProcess(connection, names, settings, page, actuator, profile)
        with stop_signals(stopping.set, stopping.set):
            running = asyncio.create_task(process.run(state), name="planner")
            waiting = asyncio.create_task(stopping.wait(), name="stop")
            try:
                await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiting.cancel()
                running.cancel()
                ended = await asyncio.gather(running, return_exceptions=True)
            if isinstance(ended[0], Exception):
                raise ended[0]
    log.info("planner.stopped")
