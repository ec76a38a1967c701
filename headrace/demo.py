"""The command `headrace demo`: an answer streams, its worker is killed, and the answer continues on another one.

Its deployment is a process with a session of its own, so that Ctrl-C reaches the demo alone. The kernel kills it when the demo
dies, and all its parts with it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self, TextIO

from headrace.base.errors import EXIT_FAILURE, EXIT_OK, StartFailed
from headrace.base.logs import wants_colour
from headrace.chat import Answer, NoAnswer, ask
from headrace.up.process import SUPERVISOR_PID, headrace_command, kill_group
from headrace.up.runfile import run_file_of

MODEL = "sim"
WORKERS = 2
_START_S = 60.0
_STOP_S = 10.0
_POLL_S = 0.02
_TAIL_LINES = 10


class DemoDeployment:
    """A deployment that answers from the start of the `with` block on. After the block nothing of it is left."""

    def __init__(self, *, token_s: float) -> None:
        """`token_s`: how long the simulated engine takes for a token."""
        self._token_s = token_s
        self.url = ""

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._folder = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-demo-", ignore_cleanup_errors=True))
            )
            self._log = self._folder / "log"
            self._process = self._start()
            stack.callback(self._stop)
            self._until("it is ready", self._ready)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def kill(self, worker: str) -> tuple[str, int]:
        """Kill a worker with SIGKILL. Returns its short name and its pid. Raises StartFailed if it does not run."""
        for part in self._run_file()["workers"]:
            if worker.startswith(f"{part['name']}-") and part["pid"] is not None:
                os.kill(part["pid"], signal.SIGKILL)
                return part["name"], part["pid"]
        raise StartFailed(f"no process of worker {worker!r} runs")

    def answered(self, request_id: str) -> dict[str, Any]:
        """Wait for the log line of an answer and return its fields. Raises StartFailed if there is none in time."""
        found: list[dict[str, Any]] = []

        def logged() -> bool:
            found[:] = [event for event in self._events("request.answered") if event["request_id"] == request_id]
            return bool(found)

        self._until(f"request {request_id} is logged", logged)
        return found[0]

    def _start(self) -> subprocess.Popen[bytes]:
        command = headrace_command(
            *("up", "--engine", "sim", "--workers", str(WORKERS), "--routers", "1", "--port", "0", "--no-console")
        )
        command += ["--data-dir", str(self._folder), "--served-name", MODEL, "--log-format", "json", "--grace", "1"]
        command += ["--engine-arg", "timing_overrides=" + json.dumps({"decode_base_s": self._token_s})]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        with self._log.open("wb") as log:
            return subprocess.Popen(
                command,
                cwd=self._folder,
                env={**environment, SUPERVISOR_PID: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            kill_group(self._process.pid)  # its parts die with it
            self._process.wait()

    def _ready(self) -> bool:
        state = self._run_file()
        self.url = state["url"]
        with urllib.request.urlopen(f"{self.url}/health", timeout=1) as answer:  # noqa: S310 - http, of our own
            workers: int = json.load(answer)["models"][MODEL]["workers"]
        return bool(state["ready"]) and workers == WORKERS and any(self._events("router.ready"))

    def _run_file(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(run_file_of(self._folder).read_bytes())
        return state

    def _events(self, name: str) -> Iterator[dict[str, Any]]:
        for line in self._log.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict) and event.get("event") == name:
                    yield event

    def _until(self, what: str, met: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(OSError, ValueError, LookupError):
                if met():
                    return
            if (code := self._process.poll()) is not None:
                raise StartFailed(f"`headrace up` ended with {code} before {what}:\n{self._tail()}")
            if time.monotonic() > deadline:
                raise StartFailed(f"`headrace up` runs for {_START_S:.0f} s, and not yet: {what}:\n{self._tail()}")
            time.sleep(_POLL_S)

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])


WIDTH = 78  # columns
INDENT = "    "


class Colour(Enum):
    PLAIN = ""
    DIM = "2"
    BOLD = "1"
    GOOD = "32"
    BAD = "31"
    FIRST = "36"  # the worker that begins
    SECOND = "33"  # the worker that goes on


class Screen:
    """Writes to `stream`. Every write is flushed, because the demo is about time."""

    def __init__(self, stream: TextIO, *, coloured: bool) -> None:
        self._stream = stream
        self._coloured = coloured
        self._column = 0  # in the text that streams; 0 = it stands at the beginning of a line
        self._word = ""  # the end of it that waits for the rest of its word
        self._colour = Colour.PLAIN  # of the text that streams

    def line(self, text: str = "", colour: Colour = Colour.PLAIN) -> None:
        """Write a line, below the text that streams if there is one."""
        self.flush_word()
        end = "\n" if self._column else ""
        self._column = 0
        self._write(f"{end}{self._painted(text, colour)}\n")

    def stream(self, text: str, colour: Colour) -> None:
        """Write the next piece of a text. A word moves to the next line as a whole, so its last one waits for what follows."""
        self._word += text
        self._colour = colour
        while (cut := self._word.find(" ", 1)) > 0:
            word, self._word = self._word[:cut], self._word[cut:]
            self._put(word, colour)

    def flush_word(self) -> None:
        """Write the word that waits: nothing follows for now."""
        word, self._word = self._word, ""
        if word:
            self._put(word, self._colour)

    def _put(self, word: str, colour: Colour) -> None:
        if self._column + len(word) > WIDTH:
            self._write("\n")
            self._column = 0
        if not self._column:
            word = word.lstrip(" ")
            self._write(INDENT)
            self._column = len(INDENT)
        self._column += len(word)
        self._write(self._painted(word, colour))

    def _painted(self, text: str, colour: Colour) -> str:
        return f"\x1b[{colour.value}m{text}\x1b[0m" if self._coloured and colour.value and text else text

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


ON_THE_WAY = 5  # most pieces that a worker can have sent and the client not read when it dies


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """The death of a worker. `seen` pieces of the answer had been read when it was killed."""

    worker: str
    pid: int
    seen: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of the demo. `problems` is empty if every promise was kept."""

    before: int  # pieces that came before the pause, a token each
    after: int
    pause_s: float
    usual_s: float  # between two pieces
    problems: tuple[str, ...]


def judge(answer: Answer, undisturbed: Answer, death: Death, *, workers: Sequence[str]) -> Verdict:
    """Judge. `workers` are those that had the request, in order, as the frontend has logged them."""
    gaps = [later - earlier for earlier, later in pairwise(answer.arrived_s)]
    after = range(max(death.seen - 1, 0), min(death.seen + ON_THE_WAY, len(gaps)))
    at = max(after, key=gaps.__getitem__, default=0)
    return Verdict(
        before=at + 1,
        after=len(answer.pieces) - at - 1,
        pause_s=gaps[at] if gaps else 0.0,
        usual_s=median(gaps) if gaps else 0.0,
        problems=tuple(_problems(answer, undisturbed, death, workers)),
    )


def _problems(answer: Answer, undisturbed: Answer, death: Death, workers: Sequence[str]) -> list[str]:
    problems = []
    if len(workers) < 2 or not workers[0].startswith(f"{death.worker}-"):
        problems.append(f"the answer was made by {', '.join(workers) or 'no worker'}, and {death.worker} was killed")
    if answer.text != undisturbed.text:
        at = next((n for n, (a, b) in enumerate(zip(answer.text, undisturbed.text, strict=False)) if a != b), None)
        place = min(len(answer.text), len(undisturbed.text)) if at is None else at
        problems.append(
            f"the texts differ from character {place} on: {answer.text[place : place + 40]!r} "
            f"in place of {undisturbed.text[place : place + 40]!r}"
        )
    for name in ("tokens", "finish_reason"):
        mine, other = getattr(answer, name), getattr(undisturbed, name)
        if mine != other:
            problems.append(f"{name} is {mine} in place of {other}")
    return problems


TOKEN_S = 0.045  # of the simulated engine: a speed at which people read
READ_S = 1.5  # to read what was written before it goes on
PAUSE = 2  # times the usual wait for a piece: from here on a wait is the pause

QUESTION = "What happens to an answer when the worker that writes it dies?"
KILL_AFTER = "when that worker dies in the middle"
ANSWER = (
    "A headrace is the channel that carries water to a mill wheel. Here the water is this answer. One worker computes it, "
    "token by token, and a message queue carries every token to the frontend, which writes it to your terminal. The queue "
    "has stored the question, and the frontend has counted what it passed on. So when that worker dies in the middle of a "
    "sentence, another one gets the question together with the words that you have read, and goes on with the next word. "
    "None is missing and none comes twice. You have seen no error: for a moment the water ran slower."
)


def run_demo(*, speed: float = 1.0) -> int:
    """Run the demo; `speed` 2 is twice as fast. Returns the exit code: 0 if every promise was kept. Raises CommandError."""
    previous = signal.signal(signal.SIGTERM, _stop)  # so that a demo that is terminated cleans up as well
    screen = Screen(sys.stdout, coloured=wants_colour(sys.stdout))
    try:
        return _Demo(screen, speed).run()
    except KeyboardInterrupt:
        screen.line("  interrupted: everything is stopped", Colour.DIM)
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)


def _stop(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


class _Demo:
    def __init__(self, screen: Screen, speed: float) -> None:
        self._screen = screen
        self._speed = speed
        self._say = screen.line

    def run(self) -> int:
        self._say()
        self._say("  headrace demo: an answer survives the worker that writes it", Colour.BOLD)
        self._say()
        self._say("  starting …", Colour.DIM)
        with DemoDeployment(token_s=TOKEN_S / self._speed) as deployment:
            self._say("  running: nats-server, a frontend, a router, worker-1 and worker-2", Colour.DIM)
            self._say("  (the engine is a simulator that recites; all else is what serves real models)", Colour.DIM)
            self._say()
            self._say(f"  » {QUESTION}", Colour.BOLD)
            self._say()
            self._wait(READ_S)
            answer, death = self._disturbed(deployment)
            self._say()
            self._say("  … the same question once more, and this time every worker lives", Colour.DIM)
            undisturbed = Answer()
            for _ in ask(deployment.url, _body(), undisturbed):
                pass
            line = deployment.answered(answer.request_id)
            verdict = judge(answer, undisturbed, death, workers=line["workers"])
            self._report(answer, death, verdict, line)
        self._say("  everything is stopped, and its temporary folder removed", Colour.DIM)
        self._say()
        return EXIT_FAILURE if verdict.problems else EXIT_OK

    def _disturbed(self, deployment: DemoDeployment) -> tuple[Answer, Death]:
        """Ask, and kill the worker in the middle of the answer. Raises NoAnswer if the answer ends before that."""
        answer = Answer()
        death: Death | None = None
        colour = Colour.FIRST
        for text in ask(deployment.url, _body(), answer):
            if death is not None and colour is Colour.FIRST and _paused(answer):
                colour = Colour.SECOND
                waited_s = answer.arrived_s[-1] - answer.arrived_s[-2]
                self._say(f"  → the other worker goes on, {waited_s * 1000:.0f} ms after the last token", Colour.SECOND)
            self._screen.stream(text, colour)
            if death is None and KILL_AFTER in answer.text:
                self._screen.flush_word()
                worker, pid = deployment.kill(answer.worker)
                death = Death(worker=worker, pid=pid, seen=len(answer.pieces))
                self._say(f"  ✗ kill -9 {pid}: {worker}, which writes this, is dead", Colour.BAD)
        if death is None:
            raise NoAnswer(f"the answer ended before its worker was killed: {answer.text!r}")
        return answer, death

    def _report(self, answer: Answer, death: Death, verdict: Verdict, line: dict[str, Any]) -> None:
        first, *others = [worker.rpartition("-")[0] for worker in line["workers"]] or ["no worker"]
        self._say()
        self._say("  What happened", Colour.BOLD)
        self._say(f"    {first:<12} killed (pid {death.pid}) when {verdict.before} tokens of the answer had arrived")
        for other in others:
            self._say(f"    {other:<12} went on with token {verdict.before + 1} and wrote the {verdict.after} that were left")
        self._say(
            f"    {'pause':<12} {verdict.pause_s * 1000:.0f} ms, once; "
            f"two tokens are {verdict.usual_s * 1000:.0f} ms apart otherwise"
        )
        self._say(f"    {'client':<12} one HTTP stream, no error, finish_reason {answer.finish_reason}")
        if verdict.problems:
            for problem in verdict.problems:
                self._say(f"    {'BROKEN':<12} {problem}", Colour.BAD)
        else:
            self._say(f"    {'compared':<12} equal to the undisturbed answer: no token lost, none twice", Colour.GOOD)
        self._say()

    def _wait(self, seconds: float) -> None:
        time.sleep(seconds / self._speed)


def _paused(answer: Answer) -> bool:
    """Return True if the last piece came after a pause. A few pieces may have been on their way when the worker died."""
    *_, before, last = answer.arrived_s
    usual_s = (before - answer.arrived_s[0]) / max(len(answer.arrived_s) - 2, 1)
    return last - before > PAUSE * usual_s


def _body() -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "vllm_xargs": {"sim_answer": ANSWER},
    }


def add_demo(commands: Any, about: str) -> None:
    demo = commands.add_parser(
        "demo",
        help=about,
        description="Stream an answer, kill the worker that writes it, and show that another one goes on. Runs two simulated "
        "workers and its own nats-server in a temporary folder, takes about 15 seconds, and leaves nothing behind.",
        epilog="exit codes: 0 every token came once and in order, 1 otherwise",
        allow_abbrev=False,
    )
    demo.add_argument("--speed", type=_speed, default=1.0, metavar="N", help="2 is twice as fast (default: 1)")
    demo.set_defaults(run=_run, prog="headrace demo")


def _speed(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 20:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.1 and 20")
    return value


def _run(parsed: argparse.Namespace) -> int:

    return run_demo(speed=parsed.speed)
