"""Supervises `headrace up`: a whole deployment on one machine, each part a process of its own.

    nats-server (unless one is given) → frontend and workers, started at once → /ready → one ready line → routers → … → stop

Each part has a keeper task that starts it, waits for its end and asks `headrace/up/restart_policy.py` what to do about
it.  Where engines
would load on too few cores, the workers after the first wait for /ready too (`headrace/up/worker_plan.py`).  Stopping
goes against the
stream: workers (they drain) and routers, frontend, nats-server.  Nothing waits for a router: requests do without.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

from headrace.base.errors import EXIT_OK, CommandError, PartFailed, StartFailed
from headrace.base.process import REFUSE, stop_signals
from headrace.config.build_settings import bundled_model_dir, needs_bundled_model
from headrace.config.settings import Settings
from headrace.up.nats_part import NatsPart
from headrace.up.parts import (
    CONSOLE_GRACE_S,
    FRONTEND_GRACE_S,
    FRONTEND_MARGIN_S,
    ROUTER_GRACE_S,
    Parts,
    Reaped,
    base_url,
    choose_port,
    kinds_of,
    make_parts,
    make_worker,
    served_models,
    stores_nothing,
)
from headrace.up.process import Child, headrace_command, last_words
from headrace.up.reaped_parts import ReapedParts
from headrace.up.restart_policy import Leave, ManagedProcess, first_of
from headrace.up.runfile import RunFile
from headrace.up.server_logins import every_pool
from headrace.up.terminal import Terminal
from headrace.up.worker_plan import socket_of, worker_control, worker_counts

# Progress and ready text of `headrace up`, with an example request for the kind of the model.

_CHAT = """
  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{{
    "model": "{model}", "max_tokens": 64,
    "messages": [{{"role": "user", "content": "Say hello."}}]}}'

or in Python:

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="none")
  hello = [{{"role": "user", "content": "Say hello."}}]
  stream = client.chat.completions.create(model="{model}", messages=hello, stream=True)
  for chunk in stream:
      print(chunk.choices[0].delta.content or "", end="", flush=True)
"""
_EMBEDDING = """
  curl {url}/v1/embeddings -H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "input": ["Say hello.", "Say goodbye."]}}'

or in Python:

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="none")
  answer = client.embeddings.create(model="{model}", input=["Say hello.", "Say goodbye."])
  print([len(item.embedding) for item in answer.data])
"""
_SCORE = """
  curl {url}/v1/rerank -H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "query": "a greeting", "documents": ["Hello!", "It rains."]}}'
"""
_CLASSIFY = """
  curl {url}/v1/classify -H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "input": ["Say hello."]}}'
"""
_IMAGE = """
  curl {url}/v1/images/generations -H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "prompt": "A river at dawn", "size": "256x256"}}' \\
    | python3 -c 'import json, sys; print(json.load(sys.stdin)["data"][0]["b64_json"])' | base64 -d > river.png
"""
_VIDEO = """
  curl {url}/v1/videos -H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "prompt": "A river at dawn", "seconds": "4"}}'
  curl {url}/v1/videos                             # how it stands
  curl {url}/v1/videos/ID/content -o river.mp4     # once it is completed
"""
_EXAMPLES = {
    "chat": _CHAT,
    "embedding": _EMBEDDING,
    "score": _SCORE,
    "classify": _CLASSIFY,
    "image": _IMAGE,
    "video": _VIDEO,
}
"""The first kind that fits decides."""


def ready_text(url: str, model: str, *, after_s: float, kinds: Sequence[str] = (), console: str = "") -> str:
    """Return the text that `up` prints once a request can be answered. `kinds` are those of the model's card.

    `console` is the link to the console, empty if there is none.
    """
    example = next((text for kind, text in _EXAMPLES.items() if kind in kinds), _CHAT)
    ready = f"Headrace is ready after {after_s:.1f} s and serves {model}."
    where = f"  {url}/v1    for clients\n  {url}/docs  in a browser: all routes\n"
    where += f"  {console}  the console\n" if console else ""
    return f"\n{ready}\n\n{where}{example.format(url=url, model=model)}\nCtrl-C stops everything.\n"


_log = structlog.get_logger()

_POLL_S = 0.05
_LOG_PROGRESS_EVERY_S = 10.0


async def until_answering(
    terminal: Terminal, host: str, ports: Sequence[int], *, tls: bool, waiting_for: Callable[[], str], began_s: float
) -> list[str]:
    """Show progress until the frontends at all `ports` say that some model can answer, and return the names of those that can.

    `began_s` is a time of the monotonic clock.
    """
    next_status_s = began_s + terminal.QUIET_START_S
    next_log_s = began_s + _LOG_PROGRESS_EVERY_S
    while True:
        served = [await served_models(host, port, tls=tls) for port in ports]
        if all(served):
            return served[0]
        now_s = time.monotonic()
        elapsed_s = now_s - began_s
        if now_s >= next_status_s:
            next_status_s = now_s + terminal.STATUS_EVERY_S
            terminal.waiting(waiting_for(), elapsed_s)
        if now_s >= next_log_s:
            next_log_s = now_s + _LOG_PROGRESS_EVERY_S
            _log.info("up.waiting", waiting_for=waiting_for(), elapsed_s=round(elapsed_s))
        await asyncio.sleep(_POLL_S)


async def say_ready(host: str, port: int, *, tls: bool, models: Sequence[str], after_s: float, console: str = "") -> None:
    """Print the ready line with commands to try. `models` can answer; `after_s` is the time that the start took.

    `console` is the link to the console, which holds its key and is printed only, never logged.
    """
    url = base_url(host, port, tls=tls)
    _log.info("up.ready", url=url, models=models, elapsed_s=round(after_s, 2))
    model = models[0]
    kinds = await kinds_of(host, port, model, tls=tls)
    sys.stdout.write(ready_text(url, model, after_s=after_s, kinds=kinds, console=console))
    sys.stdout.flush()


_KILL_AFTER_GRACE_S = 3.0  # a worker ends its own grace period; this is for one that does not
_PUBLISH_AGAIN_S = 5.0  # when the run file could not be written
_LOOK_S = 1.0  # between two looks whether the run file is still there
_SETTLE_S = 5.0  # on a terminal: for the lines of the routers, before the text that nothing is to be printed over
_SAY_STOPPING_S = 10.0
_ROUTER_WAIT_S = 15.0  # routers start once all is ready, or after this: until then requests do without, and it is ready sooner


class Supervisor:
    """The supervisor of a deployment, for one run of `headrace up`."""

    def __init__(self, settings: Settings, *, terminal: Terminal, part_env: Mapping[str, str]) -> None:
        """Plan the parts. `part_env` is their environment, to which NATS address, port and names are added.

        Raises SettingsError for numbers of workers that make no sense together.
        """
        self._settings = settings
        self._terminal = terminal
        self._data_dir = Path(settings["data_dir"]).resolve()
        self._run_file = RunFile(self._data_dir)
        self._host: str = settings["frontend.host"]
        self._tls = settings["frontend.tls_cert"] is not None
        self._port = 0
        self._part_env = {**os.environ, **part_env}
        self._environment: Mapping[str, str] = {}
        self._nats = NatsPart(settings)
        self._reaped = ReapedParts(settings, self._nats)
        self._engines = [pool["worker.engine"] for _, pool in every_pool(settings)]
        self._parts = Parts()
        self._stopping = asyncio.Event()
        self._insisted = False
        self._model_ready = asyncio.Event()
        self._answering = asyncio.Event()
        self._ready = False
        self._failure: CommandError | None = None
        self._began_s = time.monotonic()

    async def run(self) -> int:
        """Run until a stop signal (returns 0) or a failure that a restart cannot cure (raises CommandError)."""
        signal.signal(REFUSE, signal.SIG_IGN)  # inherited: it would kill a frontend that is still starting
        with self._run_file, stop_signals(self._stopping.set, self._insist):
            try:
                self._port = choose_port(self._host, self._settings["frontend.port"])
                await self._nats.start()
                environment = {**self._part_env, **self._nats.environment()}
                self._environment = environment
                self._parts = make_parts(self._settings, environment, port=self._port, logins=self._nats.logins)
                self._publish_state()
                self._say_who_answers()
                async with asyncio.TaskGroup() as group, self._control(group):
                    helpers = [
                        group.create_task(self._end_with(self._nats.keep(self._publish_state))),
                        group.create_task(self._end_with(self._nats.mend(self._stores_nothing, self._publish_state))),
                        group.create_task(self._prepare_model()),
                        group.create_task(self._announce()),
                        group.create_task(self._keep_run_file()),
                        group.create_task(self._reaped.run(self._answering)),
                    ]
                    for part in self._parts:
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

    async def _end_with(self, keeping: Coroutine[Any, Any, None]) -> None:
        """Keep the NATS server running, and end all of `up` if that fails for good."""
        try:
            await keeping
        except StartFailed as failure:
            self._failure = failure
            self._stopping.set()

    # -- parts ---------------------------------------------------------------------------------------------------------------

    async def _keep(self, part: ManagedProcess) -> None:
        try:
            if not await self._may_start(part):
                return
            while not part.stop_asked.is_set():
                code, tail = await self._run_once(part)
                serving, last = self._serves_without(part), self._parts.is_last(part)
                decision = part.state.exited(time.monotonic(), exit_code=code, serving=serving, ready=self._ready, last=last)
                if isinstance(decision, Leave):
                    self._part_left(part, decision, tail)
                    return
                why = {"error": last_words(tail)} if code > 0 else {}
                _log.warning(
                    "part.crashed",
                    part=part.name,
                    exit_code=code,
                    restart_in_s=decision.after_s,
                    crashes=decision.crashes,
                    **why,
                )
                await _wait_at_most(part.stop_asked, decision.after_s)
        finally:
            part.ended.set()

    async def _may_start(self, part: ManagedProcess) -> bool:
        if part in self._parts.workers:
            await first_of(part.stop_asked, self._model_ready, timeout_s=None)
        await part.turn(self._answering, timeout_s=self._settings["worker.start_timeout_s"])
        if part in self._parts.routers and self._parts.workers:
            await first_of(part.stop_asked, self._answering, timeout_s=_ROUTER_WAIT_S)
        if self._is_console(part):  # nothing is slower to start for it
            await first_of(part.stop_asked, self._answering, timeout_s=None)
        return not part.stop_asked.is_set()

    def _is_console(self, part: ManagedProcess) -> bool:
        return self._parts.console is not None and part is self._parts.console.part

    async def _run_once(self, part: ManagedProcess) -> tuple[int, Sequence[str]]:
        async with self._nats.worker_logins.of_start(part.name, part.env) as login:
            return await self._run_child(part, {**part.env, **login})

    async def _run_child(self, part: ManagedProcess, env: Mapping[str, str]) -> tuple[int, Sequence[str]]:
        child = await Child.start(
            headrace_command(*part.argv, python=part.python),
            env=env,
            on_lines=lambda lines: self._terminal.part_lines(part.name, lines),
        )
        part.child = child
        started = time.time()
        part.state.started(time.monotonic())
        _log.info("part.started", part=part.name, pid=child.pid)
        self._publish_state()
        if part.stop_asked.is_set():  # asked while it was being started
            child.kill()
        try:
            code = await child.wait()
            if code != EXIT_OK and not part.stop_asked.is_set():
                self._reaped.add(Reaped(child.pid, started))
            return code, child.tail
        finally:
            part.child = None
            part.ran.set()
            self._publish_state()

    def _part_left(self, part: ManagedProcess, decision: Leave, tail: Sequence[str]) -> None:
        if decision.reason == "configuration":
            error = last_words(tail)
            _log.warning("part.left", part=part.name, reason=decision.reason, error=error, fatal=decision.fatal)
        else:
            _log.info("part.left", part=part.name, reason=decision.reason)
        if not decision.fatal or self._stopping.is_set():
            return
        self._failure = PartFailed(f"{part.name} cannot start: {last_words(tail)}", exit_code=decision.exit_code)
        self._stopping.set()

    def _serves_without(self, part: ManagedProcess) -> bool:
        if part in (*self._parts.routers, *self._parts.installed) or self._is_console(part):
            return True
        return self._ready and self._parts.others_serve(part)

    async def _stop_parts(self) -> None:
        self._terminal.status("")
        _log.info("up.stopping", grace_s=self._settings["up.grace_s"], failed=self._failure is not None)
        async with asyncio.TaskGroup() as group:
            showing = group.create_task(self._show_stopping())
            await self._stop_in_order()
            showing.cancel()
        self._terminal.status("")

    async def _show_stopping(self) -> None:
        """Say what has not ended yet: on a terminal as the live line, else in a log line from time to time."""
        began_s = said_s = time.monotonic()
        while True:
            await asyncio.sleep(self._terminal.STATUS_EVERY_S)
            left = [part.name for part in self._parts if not part.ended.is_set()]
            now_s = time.monotonic()
            self._terminal.finishing(left, now_s - began_s)
            if now_s - said_s >= _SAY_STOPPING_S:
                said_s = now_s
                _log.info("up.still_stopping", parts=left, seconds=round(now_s - began_s))

    async def _stop_in_order(self) -> None:
        worker_grace_s = self._settings["up.grace_s"] + _KILL_AFTER_GRACE_S
        for frontend in self._parts.frontends:
            if frontend.child is not None:
                frontend.child.refuse_requests()
        async with asyncio.TaskGroup() as group:
            for part in (*self._parts.workers, *self._parts.installed):
                group.create_task(self._stop_part(part, grace_s=worker_grace_s))
            for router in self._parts.routers:
                group.create_task(self._stop_part(router, grace_s=ROUTER_GRACE_S))
            if self._parts.console is not None:
                group.create_task(self._stop_part(self._parts.console.part, grace_s=CONSOLE_GRACE_S))
        async with asyncio.TaskGroup() as group:
            for frontend in self._parts.frontends:
                group.create_task(self._stop_part(frontend, grace_s=FRONTEND_GRACE_S, margin_s=FRONTEND_MARGIN_S))

    async def _stop_part(self, part: ManagedProcess, *, grace_s: float, margin_s: float = 0.0) -> None:
        part.state.stop_asked()
        part.stop_asked.set()
        if part.child is not None:
            if self._insisted:
                part.child.kill()
            else:
                await part.child.stop(grace_s=grace_s, margin_s=margin_s)
        await part.ended.wait()

    def _insist(self) -> None:
        self._insisted = True
        _log.warning("up.killing")
        for part in self._parts:
            part.state.stop_asked()  # or its end would be a crash, and it would be started again
            part.stop_asked.set()
            if part.child is not None:
                part.child.kill()

    def _control(self, group: asyncio.TaskGroup) -> contextlib.AbstractAsyncContextManager[None]:
        """Let a planner start workers, while open."""

        def start(model: str, role: str) -> str:
            if self._stopping.is_set():
                raise CommandError("this deployment stops")
            part = make_worker(
                self._settings, self._environment, model=model, role=role, parts=self._parts, logins=self._nats.logins
            )
            self._parts = replace(self._parts, workers=(*self._parts.workers, part))
            group.create_task(self._keep_added(part))
            return part.name

        return worker_control(socket_of(self._data_dir), start)

    async def _keep_added(self, part: ManagedProcess) -> None:
        await self._keep(part)
        self._parts = replace(self._parts, workers=tuple(one for one in self._parts.workers if one is not part))
        self._publish_state()

    # -- the model -----------------------------------------------------------------------------------------------------------

    async def _prepare_model(self) -> None:
        if any(sum(worker_counts(pool).values()) and needs_bundled_model(pool) for _, pool in every_pool(self._settings)):
            from headrace.workers.bundled_model import is_ready

            if not is_ready(bundled_model_dir(self._settings)) and not await self._run_model_prepare():
                return
        self._model_ready.set()

    async def _run_model_prepare(self) -> bool:
        command = headrace_command("model", "prepare")
        env = {**self._part_env, "HEADRACE_DATA_DIR": str(self._data_dir)}
        child = await Child.start(command, env=env, on_lines=lambda lines: self._terminal.part_lines("model", lines))
        try:
            code = await child.wait()
        finally:
            child.kill()
        if code != EXIT_OK:
            self._failure = PartFailed(f"the bundled model cannot be prepared: {last_words(child.tail)}", exit_code=code)
            self._stopping.set()
        return code == EXIT_OK

    # -- what people and tools see ---------------------------------------------------------------------------------------------

    async def _announce(self) -> None:
        ports = [frontend.metrics_port or self._port for frontend in self._parts.frontends]
        models = await until_answering(
            self._terminal, self._host, ports, tls=self._tls, waiting_for=self._waiting_for, began_s=self._began_s
        )
        self._ready = True
        self._answering.set()
        self._terminal.status("")
        self._publish_state()
        after_s = time.monotonic() - self._began_s
        routers = [router.name for router in self._parts.routers]
        serving = [worker.name for worker in self._parts.workers if worker.serves]
        await self._terminal.settle(routers, one_of=serving, timeout_s=_SETTLE_S)
        link = self._parts.console.link if self._parts.console is not None else ""
        await say_ready(self._host, self._port, tls=self._tls, models=models, after_s=after_s, console=link)

    def _say_who_answers(self) -> None:
        if any(worker.serves for worker in self._parts.workers):
            return
        address = f" --nats {self._nats.url} --data-dir {self._data_dir}" if self._nats.url else ""  # its login is there
        _log.info(
            "up.no_workers",
            meaning="none that answers requests is started here; the deployment is ready when one has joined",
            join=f"headrace worker{address}",
        )

    async def _stores_nothing(self) -> bool:
        return await stores_nothing(self._host, self._port, tls=self._tls)

    def _waiting_for(self) -> str:
        if not self._model_ready.is_set():
            return "preparing the bundled model"
        serving = [worker for worker in self._parts.workers if worker.serves]
        if not serving:
            return "waiting for a worker that answers requests to join"
        if any(worker.child is not None or not worker.ran.is_set() for worker in serving):  # it runs, or is about to
            return f"waiting for the engine ({' or '.join(dict.fromkeys(self._engines))}) to load"
        return "waiting for a worker to start again"

    def _publish_state(self) -> None:
        if not self._parts.frontends:
            return
        frontends = [{**frontend.describe(), "port": self._port} for frontend in self._parts.frontends]
        state: dict[str, Any] = {
            "pid": os.getpid(),
            "ready": self._ready,
            "url": base_url(self._host, self._port, tls=self._tls),
            "prefix": self._settings["prefix"],
            "namespace": self._settings["namespace"],
            "nats": {
                **self._nats.describe(),
                "context": self._nats.logins.operator_context or self._settings["nats.context"],
            },
            "frontend": frontends[0],
            "frontends": frontends,
            "workers": [worker.describe() for worker in self._parts.workers],
            "routers": [router.describe() for router in self._parts.routers],
            "console": self._parts.console.describe() if self._parts.console is not None else None,
        }
        try:
            self._run_file.write(state)
        except OSError as error:  # a full disk must not end `up`
            _log.warning("up.run_file_not_written", path=str(self._run_file.path), error=error.strerror)
            if not self._stopping.is_set():
                asyncio.get_running_loop().call_later(_PUBLISH_AGAIN_S, self._publish_state)

    async def _keep_run_file(self) -> None:
        """Write the run file again if it is removed meanwhile: commands find the deployment by it."""
        while True:
            await asyncio.sleep(_LOOK_S)
            if not self._run_file.path.exists():
                self._publish_state()


async def _wait_at_most(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        pass
