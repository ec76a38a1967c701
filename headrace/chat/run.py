"""Runs `headrace chat`: a conversation on a terminal, or one answer where there is none."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from headrace.base.errors import EXIT_OK, CommandError
from headrace.chat.conversation import Command, Conversation, help_text, read_line
from headrace.chat.streamed_answer import Answer, NoAnswer, ask, served_models
from headrace.up.runfile import read_run_file

DEFAULT_URL = "http://127.0.0.1:8000"
KEY = "HEADRACE_API_KEY"  # of several, which a frontend may take, the first is given


class Service(Protocol):
    """The HTTP interface of a deployment."""

    def models(self) -> list[str]:
        """Return the names of the served models. Raises NoAnswer."""

    def ask(self, body: dict[str, Any], answer: Answer) -> Iterator[str]:
        """Yield the pieces of an answer. Raises NoAnswer."""


class HttpService:
    """`Service` at an address."""

    def __init__(self, url: str, api_key: str) -> None:
        self.url = url.rstrip("/")
        self._api_key = api_key

    def models(self) -> list[str]:
        return served_models(self.url, api_key=self._api_key)

    def ask(self, body: dict[str, Any], answer: Answer) -> Iterator[str]:
        return ask(self.url, body, answer, api_key=self._api_key)


def run_chat(data_dir: str, *, url: str | None, model: str | None, system: str, text: str) -> int:
    """Chat with the deployment at `url`, else with the one that runs with the data folder. Raises CommandError."""
    running = read_run_file(Path(data_dir).resolve()) if url is None else None
    address = url or (running.url if running is not None else None) or DEFAULT_URL
    service = HttpService(address, os.environ.get(KEY, "").split(",")[0])
    chat = Chat(service, Conversation(_chosen(service, model), system=system), sys.stdout.write)
    if text or not sys.stdin.isatty():
        given = "" if sys.stdin.isatty() else sys.stdin.read().strip()
        question = "\n\n".join(part for part in (text, given) if part)
        if not question:
            raise CommandError("there is nothing to ask: give a text, or write it to the standard input")
        chat.say(question)
        return EXIT_OK
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives input() its line editing and history
    sys.stdout.write(f"{chat.conversation.model} at {address}; /help lists the commands, Ctrl-D ends\n")
    while chat.turn(_typed):
        sys.stdout.flush()
    return EXIT_OK


def _chosen(service: Service, model: str | None) -> str:
    """Return the model to talk to: the given one, else the first that is served. Raises CommandError naming the others."""
    served = service.models()
    if model is None:
        if not served:
            raise CommandError("no model is served at the moment: start a worker, or wait until one is ready")
        return served[0]
    if model not in served:
        raise CommandError(f"no model {model!r} is served; served: {', '.join(served) or 'none'}")
    return model


def _typed() -> str | None:
    """Return the next line, None at the end."""
    try:
        return input("> ")
    except EOFError:
        sys.stdout.write("\n")
        return None
    except KeyboardInterrupt:  # with nothing to stop: only the line is given up
        sys.stdout.write("\n")
        return ""


class Chat:
    """A conversation with a service. Answers are written as they arrive."""

    def __init__(self, service: Service, conversation: Conversation, write: Callable[[str], object]) -> None:
        self.conversation = conversation
        self._service = service
        self._write = write
        self._stats = True

    def turn(self, typed: Callable[[], str | None]) -> bool:
        """Read a line and do what it says. Returns False at the end."""
        line = typed()
        if line is None:
            return False
        match read_line(line):
            case "":
                pass
            case str(text):
                try:
                    self.say(text)
                except NoAnswer as error:
                    self._write(f"{error}\n")
            case Command("/quit"):
                return False
            case command:
                self._obey(command)
        return True

    def say(self, text: str) -> Answer:
        """Ask, and write the answer with its figures. Ctrl-C ends the answer, and it counts as far as it came.

        Raises NoAnswer; then the question counts as not asked.
        """
        answer = Answer()
        began_s = time.monotonic()
        pieces = self._service.ask(self.conversation.ask(text), answer)
        stopped = ""
        try:
            for piece in pieces:
                self._write(piece)
                sys.stdout.flush()
        except KeyboardInterrupt:
            stopped = " (stopped)"
        except NoAnswer:
            self.conversation.answered("")
            raise
        finally:
            if (close := getattr(pieces, "close", None)) is not None:
                close()
        self.conversation.answered(answer.text)
        self._write("\n")
        if self._stats:
            self._write(f"{figures(answer, began_s, time.monotonic())}{stopped}\n")
        return answer

    def _obey(self, command: Command) -> None:
        conversation = self.conversation
        match command:
            case Command("/model", ""):
                self._try(lambda: self._write("".join(f"  {name}\n" for name in self._service.models())))
            case Command("/model", name):
                self._try(lambda: self._change(name))
            case Command("/system", text):
                conversation.system = text
            case Command("/stats"):
                self._stats = not self._stats
            case Command("/clear"):
                conversation.clear()
            case Command(_, unknown):
                self._write(help_text(unknown) + "\n")

    def _change(self, name: str) -> None:
        self.conversation.model = _chosen(self._service, name)

    def _try(self, work: Callable[[], object]) -> None:
        try:
            work()
        except CommandError as error:
            self._write(f"{error}\n")


def figures(answer: Answer, began_s: float, ended_s: float) -> str:
    """Return the figures of an answer in one line: first token, speed, tokens, worker."""
    parts = []
    if answer.arrived_s:
        first_s = answer.arrived_s[0]
        parts.append(f"first token {(first_s - began_s) * 1000:.0f} ms")
        if answer.tokens > 1 and ended_s > first_s:
            parts.append(f"{(answer.tokens - 1) / (ended_s - first_s):.0f} tokens/s")
    if answer.prompt_tokens:
        parts.append(f"{answer.prompt_tokens} prompt tokens ({answer.cached_tokens} cached), {answer.tokens} in the answer")
    if answer.worker:
        parts.append(answer.worker)
    return f"[{', '.join(parts) or 'no text'}]"
