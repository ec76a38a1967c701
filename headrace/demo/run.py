"""Runs `headrace demo`: an answer streams, the worker that makes it is killed, the sentence goes on."""

from __future__ import annotations

import signal
import sys
import time
from types import FrameType
from typing import Any, NoReturn

from headrace.base.errors import EXIT_FAILURE, EXIT_OK
from headrace.base.logs import wants_colour
from headrace.chat.streamed_answer import Answer, NoAnswer, ask
from headrace.demo.deployment import MODEL, DemoDeployment
from headrace.demo.screen import Colour, Screen
from headrace.demo.verdict import Death, Verdict, judge

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
