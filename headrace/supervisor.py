"""`headrace up`: a whole deployment on one machine, every part a process of its own.

    nats-server (unless one is given) → frontend and workers, started at once → /ready → one ready line → routers → … → stop

Each part has a keeper task that starts it, waits for its end and asks `headrace/restart.py` what to do about it.  Stopping goes
against the stream: workers (they drain) and routers, frontend, nats-server.  Nothing waits for a router: requests do without.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from headrace.catalogue import BY_KEY
from headrace.compose import bundled_model_dir, needs_bundled_model
from headrace.embedded import NatsPart
from headrace.errors import EXIT_OK, CommandError, PartFailed
from headrace.probe import base_url, choose_port, get, ready_text, served_models
from headrace.process import Child, headrace_command, last_words
from headrace.restart import Leave, RestartState
from headrace.runfile import RunFile
from headrace.settings import Settings, as_text
from headrace.signals import stop_signals
from headrace.terminal import Terminal

_log = structlog.get_logger()

_KILL_AFTER_GRACE_S = 3.0  # a worker ends its own grace period; this is for one that does not
_FRONTEND_GRACE_S = 5.0
_ROUTER_GRACE_S = 5.0
_ROUTER_WAIT_S = 15.0  # routers start once all is ready, or after this: until then requests do without, and it is ready sooner
_POLL_S = 0.05
_STATUS_EVERY_S = 1.0
_QUIET_START_S = 2.0  # starts faster than this show no progress
_LOG_PROGRESS_EVERY_S = 10.0


@dataclass(slots=True)
class Part:
    """One process to keep running. `argv` is what `ps` shows after `headrace`; the rest travels in `env`."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    state: RestartState
    child: Child | None = None
    stop_asked: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Supervisor:
    """One run of `headrace up`."""

    def __init__(self, settings: Settings, *, terminal: Terminal, part_env: Mapping[str, str]) -> None:
        """`part_env` is the environment of the parts, before what is said here on top (NATS address, port, names)."""
        self._settings = settings
        self._terminal = terminal
        self._data_dir = Path(settings["data_dir"]).resolve()
        self._run_file = RunFile(self._data_dir)
        self._host: str = settings["frontend.host"]
        self._port = 0
        self._part_env = {**os.environ, **part_env}
        self._nats = NatsPart(settings)
        self._frontend: Part | None = None
        self._workers: list[Part] = []
        self._routers: list[Part] = []
        self._stopping = asyncio.Event()
        self._insisted = False
        self._model_ready = asyncio.Event()
        self._answering = asyncio.Event()
        self._ready = False
        self._failure: CommandError | None = None
        self._began_s = time.monotonic()

    async def run(self) -> int:
        """Until a stop signal (0) or a failure that a restart cannot cure. Raises CommandError for the latter."""
        with self._run_file, stop_signals(self._stopping.set, self._insist):
            try:
                self._port = choose_port(self._host, self._settings["frontend.port"])
                await self._nats.start()
                self._make_parts()
                self._publish_state()
                async with asyncio.TaskGroup() as group:
                    helpers = [
                        group.create_task(self._nats.keep(self._publish_state)),
                        group.create_task(self._prepare_model()),
                        group.create_task(self._announce()),
                    ]
                    for part in self._parts():
                        group.create_task(self._keep(part))
                    await self._stopping.wait()
                    await self._stop_parts()
                    for helper in helpers:
                        helper.cancel()
            finally:
                self._terminal.status("")
                await self._nats.stop(at_once=self._insisted)
        if self._failure is not None:
            raise self._failure
        _log.info("up.stopped")
        return EXIT_OK

    # -- parts ---------------------------------------------------------------------------------------------------------------

    def _make_parts(self) -> None:
        common = {**self._part_env, **self._nats.environment()}
        settings = self._settings
        self._frontend = Part(
            "frontend",
            ("frontend", "--port", str(self._port)),
            {**common, "HEADRACE_FRONTEND_DRAIN_GRACE_S": str(_FRONTEND_GRACE_S - 1.0)},
            RestartState(essential=True),
        )
        worker_env = {**common, "HEADRACE_WORKER_DRAIN_GRACE_S": str(settings["up.grace_s"])}
        if settings["worker.engine"] == "vllm" and settings["up.workers"] > 1:
            # Engines on the CPU take a thread per core each; together that is slower by an order of magnitude.
            worker_env.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // settings["up.workers"])))
        first_port = settings["worker.metrics_port"]
        for number in range(1, settings["up.workers"] + 1):
            name = f"worker-{number}"
            env = {**worker_env, "HEADRACE_WORKER_METRICS_PORT": str(first_port + number - 1)} if first_port else worker_env
            argv = ["worker", "--engine", settings["worker.engine"], "--name", name]
            if settings["worker.model"]:
                argv += ["--model", settings["worker.model"]]
            self._workers.append(Part(name, tuple(argv), env, RestartState(essential=False)))
        router_env = {**common, "HEADRACE_ROUTER_DRAIN_GRACE_S": str(_ROUTER_GRACE_S - 1.0)}
        for number in range(1, settings["up.routers"] + 1):
            name = f"router-{number}"
            port = settings["router.metrics_port"]
            env = {**router_env, "HEADRACE_ROUTER_METRICS_PORT": str(port + number - 1)} if port else router_env
            self._routers.append(Part(name, ("router", "--name", name), env, RestartState(essential=False)))

    def _parts(self) -> list[Part]:
        return [part for part in (self._frontend, *self._workers, *self._routers) if part is not None]

    async def _keep(self, part: Part) -> None:
        """Start the part again and again until it is to be left alone."""
        try:
            if part in self._workers and not await self._model_is_ready(part):
                return
            if part in self._routers and self._workers:
                await _first(part.stop_asked, self._answering, timeout_s=_ROUTER_WAIT_S)
            while not part.stop_asked.is_set():
                code, tail = await self._run_once(part)
                decision = part.state.exited(time.monotonic(), exit_code=code, serving=self._serves_without(part))
                if isinstance(decision, Leave):
                    self._part_left(part, decision, tail)
                    return
                _log.warning(
                    "part.crashed", part=part.name, exit_code=code, restart_in_s=decision.after_s, crashes=decision.crashes
                )
                await _wait_at_most(part.stop_asked, decision.after_s)
        finally:
            part.ended.set()

    async def _run_once(self, part: Part) -> tuple[int, Sequence[str]]:
        child = await Child.start(
            headrace_command(*part.argv), env=part.env, on_line=lambda line: self._terminal.part_line(part.name, line)
        )
        part.child = child
        part.state.started(time.monotonic())
        _log.info("part.started", part=part.name, pid=child.pid)
        self._publish_state()
        if part.stop_asked.is_set():  # asked while it was being started
            child.kill()
        try:
            return await child.wait(), child.tail
        finally:
            part.child = None
            self._publish_state()

    def _part_left(self, part: Part, decision: Leave, tail: Sequence[str]) -> None:
        _log.info("part.left", part=part.name, reason=decision.reason)
        if not decision.fatal or self._stopping.is_set():
            return
        self._failure = PartFailed(f"{part.name} cannot start: {last_words(tail)}", exit_code=decision.exit_code)
        self._stopping.set()

    def _serves_without(self, part: Part) -> bool:
        if part in self._routers:
            return True
        return self._ready and any(other.child is not None for other in self._workers if other is not part)

    async def _stop_parts(self) -> None:
        self._terminal.status("")
        _log.info("up.stopping", grace_s=self._settings["up.grace_s"])
        worker_grace_s = self._settings["up.grace_s"] + _KILL_AFTER_GRACE_S
        async with asyncio.TaskGroup() as group:
            for worker in self._workers:
                group.create_task(self._stop_part(worker, grace_s=worker_grace_s))
            for router in self._routers:
                group.create_task(self._stop_part(router, grace_s=_ROUTER_GRACE_S))
        if self._frontend is not None:
            await self._stop_part(self._frontend, grace_s=_FRONTEND_GRACE_S)

    async def _stop_part(self, part: Part, *, grace_s: float) -> None:
        part.state.stop_asked()
        part.stop_asked.set()
        if part.child is not None:
            if self._insisted:
                part.child.kill()
            else:
                await part.child.stop(grace_s=grace_s)
        await part.ended.wait()

    def _insist(self) -> None:
        """The second Ctrl-C."""
        self._insisted = True
        _log.warning("up.killing")
        for part in self._parts():
            if part.child is not None:
                part.child.kill()

    # -- the model -----------------------------------------------------------------------------------------------------------

    async def _prepare_model(self) -> None:
        if self._settings["up.workers"] and needs_bundled_model(self._settings):
            from workers.bundled import is_ready

            if not is_ready(bundled_model_dir(self._settings)) and not await self._run_model_prepare():
                return
        self._model_ready.set()

    async def _run_model_prepare(self) -> bool:
        command = headrace_command("model", "prepare")
        env = {**self._part_env, BY_KEY["data_dir"].env: as_text(BY_KEY["data_dir"], str(self._data_dir))}
        child = await Child.start(command, env=env, on_line=lambda line: self._terminal.part_line("model", line))
        try:
            code = await child.wait()
        finally:
            child.kill()
        if code != EXIT_OK:
            self._failure = PartFailed(f"the bundled model cannot be prepared: {last_words(child.tail)}", exit_code=code)
            self._stopping.set()
        return code == EXIT_OK

    async def _model_is_ready(self, part: Part) -> bool:
        """False when the part is to be stopped before there is a model."""
        await _first(part.stop_asked, self._model_ready, timeout_s=None)
        return not part.stop_asked.is_set()

    # -- what people and tools see ---------------------------------------------------------------------------------------------

    async def _announce(self) -> None:
        """Show progress until the frontend can answer, then print the ready line once."""
        next_status_s = self._began_s + _QUIET_START_S
        next_log_s = self._began_s + _LOG_PROGRESS_EVERY_S
        while True:
            status, _ = await get(self._host, self._port, "/ready")
            if status == 200:
                break
            now_s = time.monotonic()
            elapsed_s = now_s - self._began_s
            if now_s >= next_status_s:
                next_status_s = now_s + _STATUS_EVERY_S
                self._terminal.status(f"  … {self._waiting_for()}, {elapsed_s:.0f} s")
            if now_s >= next_log_s:
                next_log_s = now_s + _LOG_PROGRESS_EVERY_S
                _log.info("up.waiting", waiting_for=self._waiting_for(), elapsed_s=round(elapsed_s))
            await asyncio.sleep(_POLL_S)
        models = await served_models(self._host, self._port)
        self._ready = True
        self._answering.set()
        self._terminal.status("")
        self._publish_state()
        url = base_url(self._host, self._port)
        elapsed_s = time.monotonic() - self._began_s
        _log.info("up.ready", url=url, models=models, elapsed_s=round(elapsed_s, 2))
        sys.stdout.write(ready_text(url, models[0] if models else "MODEL", after_s=elapsed_s))
        sys.stdout.flush()

    def _waiting_for(self) -> str:
        if not self._model_ready.is_set():
            return "preparing the bundled model"
        if not self._workers:
            return "waiting for a worker to join"
        if any(worker.child is not None for worker in self._workers):
            return f"waiting for the engine ({self._settings['worker.engine']}) to load"
        return "waiting for a worker to start again"

    def _publish_state(self) -> None:
        if self._frontend is None:
            return
        state: dict[str, Any] = {
            "pid": os.getpid(),
            "ready": self._ready,
            "url": base_url(self._host, self._port),
            "nats": self._nats.describe(),
            "frontend": {**_describe(self._frontend), "port": self._port},
            "workers": [_describe(worker) for worker in self._workers],
            "routers": [_describe(router) for router in self._routers],
        }
        self._run_file.write(state)


def _describe(part: Part) -> dict[str, Any]:
    return {"name": part.name, "pid": part.child.pid if part.child else None}


async def _first(*events: asyncio.Event, timeout_s: float | None) -> None:
    """Return when one of them is set, or in time."""
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for future in waiting:
            future.cancel()


async def _wait_at_most(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        pass
