"""A deployment of the simulator that a scenario hurts, with clients who know every answer, and the account at the end."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from headrace.broker.codec import decode, encode
from headrace.broker.errors import WireError
from headrace.broker.messages.control import Inspect, Inspection
from headrace.commands.control import live_workers
from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.subjects import Subjects
from headrace.tools.chaos.client import Address, Cut, StreamChecker, check_answer, post, refusal
from headrace.tools.chaos.deployment import MODEL, ChaosDeployment, DeploymentShape, Process, until_at_rest, until_well
from headrace.tools.chaos.ledger import Outcome
from headrace.tools.chaos.questions import Question
from headrace.up.parts import get

NAMES = Subjects()
WELL_S = 120.0
STEP_S = 0.02


class Hurt(ChaosDeployment):
    """With environment variables of its own, and perhaps a server of its own."""

    def __init__(
        self,
        folder: Path,
        shape: DeploymentShape,
        environment: Mapping[str, str],
        server: EmbeddedServer | None,
        flags: Mapping[str, Sequence[str]],
    ) -> None:
        super().__init__(folder, shape)
        self._more = environment
        self._flags = flags
        if server is not None:
            self.server = server

    def _process(self, name: str, kind: str, argv: tuple[str, ...]) -> Process:
        return super()._process(name, kind, (*argv, *self._flags.get(name, ())))

    def _environment(self) -> dict[str, str]:
        # prompts are ids here: a second tokenizer would cost each frontend a third of its start
        return {**super()._environment(), "HEADRACE_FRONTEND_FAST_TOKENIZER": "false", **self._more}


class Asked:
    """One request on its way. `answer` is how it ended; `came`: when pieces came, on the monotonic clock."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.id = ""
        self.came: list[float] = []
        self.began = asyncio.Event()
        self.outcome = Outcome.OPEN
        self.detail = ""
        self.status = 0
        self.task: asyncio.Task[Asked] | None = None

    def end(self, outcome: Outcome, detail: str = "") -> None:
        self.outcome, self.detail = outcome, detail


class Scene:
    """What a scenario does and looks at."""

    def __init__(self, deployment: ChaosDeployment, connection: Connection, options: ConnectOptions) -> None:
        self.deployment = deployment
        self.connection = connection
        self.options = options
        self._number = 0

    # -- asking --------------------------------------------------------------------------------------------------------------

    def question(self, tokens: int, *, stream: bool = True, prompt: int = 40) -> Question:
        """One that nobody has asked before."""
        self._number += 1
        ids = (200 + self._number // 2000, 200 + self._number % 2000, *range(300, 298 + prompt))
        return Question(number=self._number, prompt=ids, max_tokens=tokens, stream=stream)

    def begin(
        self,
        question: Question,
        *,
        deadline_s: float = 300.0,
        frontend: int = 0,
        extra: Mapping[str, Any] | None = None,
        name: str = "",
    ) -> Asked:
        """Ask in a task of its own. `extra` goes into the body; `name` is what the client calls the request."""
        asked = Asked(question)
        headers = {"x-request-timeout-s": f"{deadline_s:g}", **({"x-request-id": name} if name else {})}
        body = {**question.body(MODEL), **(extra or {})}
        asked.task = asyncio.create_task(self._exchange(asked, self.deployment.frontends[frontend], body, headers))
        return asked

    async def ask(self, question: Question | None = None, **options: Any) -> Asked:
        """Ask and see it to its end."""
        asked = self.begin(question or self.question(8, stream=False), **options)
        assert asked.task is not None
        return await asked.task

    async def _exchange(self, asked: Asked, frontend: Address, body: dict[str, Any], headers: dict[str, str]) -> Asked:
        try:
            async with post(frontend.host, frontend.port, "/v1/completions", body, headers=headers) as response:
                asked.id, asked.status = response.headers.get("x-request-id", ""), response.status
                if response.status != 200:
                    told = refusal(response.status, response.headers, await response.body())
                    asked.end(told.outcome, told.detail)
                elif not asked.question.stream:
                    told = check_answer(asked.question, json.loads(await response.body()))
                    asked.end(told.outcome, told.detail)
                else:
                    checker = StreamChecker(asked.question)
                    async for data in response.events():
                        if data == b"[DONE]":
                            told = checker.ended()
                            asked.end(told.outcome, told.detail)
                            return asked
                        event = json.loads(data)
                        asked.id = str(event.get("id", asked.id)).removeprefix("cmpl-")
                        if (broken := checker.feed(event)) is not None:
                            asked.end(broken.outcome, broken.detail)
                            return asked
                        asked.came.append(time.monotonic())
                        asked.began.set()
                    asked.end(Outcome.LOST, "no [DONE]")
        except Cut as error:
            asked.end(Outcome.CUT, str(error))
        except (OSError, TimeoutError) as error:
            asked.end(Outcome.UNREACHED, str(error))
        return asked

    async def answered(self, *asked: Asked) -> None:
        """All of them were answered once and right."""
        for each in asked:
            assert each.task is not None
            await each.task
        wrong = [f"{each.id}: {each.outcome} {each.detail}" for each in asked if each.outcome is not Outcome.ANSWERED]
        assert wrong == [], "\n".join(wrong)

    async def serves(self, question: Question | None = None, **options: Any) -> None:
        """Ask once, and again after a refusal that says to try again: a busy machine may cost a lease. The answer is right."""
        question = question or self.question(8, stream=False)
        deadline = time.monotonic() + WELL_S
        while (asked := await self.ask(question, **options)).outcome is Outcome.REFUSED and time.monotonic() < deadline:
            await asyncio.sleep(0.5)
        await self.answered(asked)

    # -- looking -------------------------------------------------------------------------------------------------------------

    async def until(self, what: str, met: Callable[[], Any], timeout_s: float = 90.0) -> None:
        """`met` is a function, of coroutines or not, that is true in time; what cannot be seen just now counts as no."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                found = met()
                if asyncio.iscoroutine(found):
                    found = await found
            except (JetStreamError, WireError, OSError, LookupError, ValueError):
                found = False
            if found:
                return
            assert time.monotonic() < deadline, f"not in time: {what}\n{self.tails()}"
            await asyncio.sleep(STEP_S)

    async def well(self, timeout_s: float = WELL_S) -> None:
        """Everybody runs and takes part."""
        assert await until_well(self.deployment, self.connection, NAMES, timeout_s=timeout_s), self.tails()

    async def at_rest(self, timeout_s: float = 90.0) -> None:
        """Nothing in flight, queued, held or left behind."""
        found = await until_at_rest(self.connection, NAMES, self.deployment.frontends, timeout_s=timeout_s)
        assert not any(found.counts.values()), found

    async def status(self, path: str = "/ready", frontend: int = 0) -> tuple[int, dict[str, Any]]:
        """What a frontend says there."""
        address = self.deployment.frontends[frontend]
        code, body = await get(address.host, address.port, path)
        return code, json.loads(body)

    async def not_ready(self, *words: str, frontend: int = 0) -> bool:
        """/ready says no, and all of these words."""
        code, told = await self.status(frontend=frontend)
        return code == 503 and all(word in str(told.get("reason")) for word in words)

    async def ready(self, frontend: int = 0) -> bool:
        return (await self.status(frontend=frontend))[0] == 200

    async def inspections(self) -> dict[str, Inspection]:
        """What each live worker holds, by the name of its process."""
        found = {}
        for member in await live_workers(self.connection, NAMES):
            answer = await self.connection.request(NAMES.control(member.worker), encode(Inspect()), timeout_s=2)
            found[member.worker.rpartition("-")[0]] = decode(Inspection, answer)
        return found

    async def held(self) -> int:
        """Runs at all workers."""
        return sum(len(inspection.runs) for inspection in (await self.inspections()).values())

    def process(self, name: str) -> Process:
        return next(process for process in self.deployment.processes if process.name == name)

    def pids(self) -> dict[str, int]:
        """By name: to see that nobody was started again."""
        return {process.name: process.pid for process in self.deployment.processes}

    def log(self, name: str) -> str:
        return (self.deployment.folder / "logs" / f"{name}.log").read_text()

    def tails(self) -> str:
        return "\n".join(f"--- {p.name}\n{self.log(p.name)[-1500:]}" for p in self.deployment.processes)

    async def command(self, *words: str) -> str:
        """A `headrace` command as an operator types it."""
        argv = [sys.executable, "-P", "-m", "headrace", *words, "--nats", self.deployment.server.url]

        def run() -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                argv, capture_output=True, text=True, timeout=60, check=False, cwd=self.deployment.folder, env=None
            )

        done = await asyncio.to_thread(run)
        assert done.returncode == 0, done.stderr
        return done.stdout


@asynccontextmanager
async def deployed(
    folder: Path,
    *,
    shape: DeploymentShape | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Sequence[str]] | None = None,
    server: EmbeddedServer | None = None,
    options: Mapping[str, Any] | None = None,
    engine: Sequence[str] = ('timing_overrides={"decode_base_s": 0.02, "prefill_tokens_per_s": 20000}',),
    wait_well: bool = True,
    **parts: Any,
) -> AsyncIterator[Scene]:
    """Running and well. `parts` are those of `DeploymentShape`; `flags` are more words of a command line, by
    the name of the process; `options` are for the scenario's own connection."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = shape or DeploymentShape(**{"workers": 1, "routers": 1, "frontends": 1, **parts}, engine_arguments=engine)
    async with Hurt(folder, shape, environment or {}, server, flags or {}) as deployment:
        connect = ConnectOptions(servers=(deployment.server.url,), **(options or {}))
        if not wait_well:
            yield Scene(deployment, None, connect)  # type: ignore[arg-type]  # the scenario connects when it can
            return
        async with await Connection.connect(connect, subjects=NAMES) as connection:
            scene = Scene(deployment, connection, connect)
            await scene.well()
            yield scene
