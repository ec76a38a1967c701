"""The `headrace chat` command: a conversation on a terminal, or one answer where there is none."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from headrace.base.errors import EXIT_OK, CommandError
from headrace.config.build_settings import add_setting_flags, read_settings
from headrace.up.runfile import read_run_file

COMMANDS = {
    "/model": "NAME  talk to another model; without a name, list them",
    "/system": "TEXT  what the model is told first; without a text, nothing",
    "/stats": "show or hide the figures behind each answer",
    "/clear": "forget what was said",
    "/help": "list the commands",
    "/quit": "end (Ctrl-D too)",
}


@dataclass(frozen=True, slots=True)
class Command:
    """A command with what stands behind it."""

    name: str
    argument: str = ""


def read_line(text: str) -> Command | str:
    """Return the command in a line, or the message; `//` begins a message with one slash. An unknown command is `/help`."""
    line = text.strip()
    if line.startswith("//"):
        return line[1:]
    if not line.startswith("/"):
        return line
    name, _, argument = line.partition(" ")
    if name == "/exit":
        name = "/quit"
    return Command(name, argument.strip()) if name in COMMANDS else Command("/help", name)


def help_text(unknown: str = "") -> str:
    """Return the list of commands; `unknown` is one that is not among them."""
    lines = [f"there is no command {unknown!r}"] if unknown else []
    return "\n".join([*lines, *(f"  {name:<8} {about}" for name, about in COMMANDS.items())])


@dataclass(slots=True)
class Conversation:
    """The messages so far, and the model that they go to."""

    model: str
    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, text: str) -> dict[str, Any]:
        self.messages.append({"role": "user", "content": text})
        first = [{"role": "system", "content": self.system}] if self.system else []
        return {"model": self.model, "messages": [*first, *self.messages]}

    def answered(self, text: str) -> None:
        """Add the model's answer. An empty one takes the question back, so that messages go on in turns."""
        if text:
            self.messages.append({"role": "assistant", "content": text})
        else:
            self.messages.pop()

    def clear(self) -> None:
        """Forget what was said; model and system message stay."""
        self.messages.clear()


_SILENT_S = 30.0  # the longest wait for the next piece


class NoAnswer(CommandError):
    """A question was not answered."""


@dataclass(slots=True)
class Answer:
    """An answer as it was read. `arrived_s` has the time of each piece of text, by a monotonic clock."""

    worker: str = ""  # that the router chose
    request_id: str = ""
    pieces: list[str] = field(default_factory=list)
    arrived_s: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    tokens: int = 0  # by its usage
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def take(self, event: dict[str, Any], now_s: float) -> str:
        """Add an event of the stream. Returns its text. Raises NoAnswer for an error."""
        if (error := event.get("error")) is not None:
            raise NoAnswer(f"the stream ended with {error.get('code')}: {error.get('message')}")
        self.request_id = str(event.get("id", "")).removeprefix("chatcmpl-")
        if usage := event.get("usage"):
            self.tokens = usage["completion_tokens"]
            self.prompt_tokens = usage.get("prompt_tokens", 0)
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        text = ""
        for choice in event["choices"]:
            text += choice["delta"].get("content") or ""
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if text:
            self.pieces.append(text)
            self.arrived_s.append(now_s)
        return text


def read_events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream up to `[DONE]`. Raises NoAnswer if it ends before."""
    for line in lines:
        name, _, data = line.strip().partition(b": ")
        if name != b"data":
            continue
        if data == b"[DONE]":
            return
        yield json.loads(data)
    raise NoAnswer("the stream ended before its last event")


def ask(url: str, body: dict[str, Any], answer: Answer, *, api_key: str = "") -> Iterator[str]:
    """Ask, and yield pieces of text as they arrive; `answer` is filled meanwhile. Raises NoAnswer.

    A caller that stops reading closes the connection, which cancels the request.
    """
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        with closing(_connection(url)) as connection:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), _headers(api_key))
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise NoAnswer(f"the question was answered with {response.status}: {_message(response.read())}")
            answer.worker = json.loads(response.headers.get("x-headrace-decision") or "{}").get("worker", "")
            for event in read_events(iter(response.readline, b"")):
                if text := answer.take(event, time.monotonic()):
                    yield text
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswer(f"the connection to {url} broke: {error!r}") from error


def served_models(url: str, *, api_key: str = "") -> list[str]:
    """Return the names of the models that are served. Raises NoAnswer."""
    try:
        with closing(_connection(url)) as connection:
            connection.request("GET", "/v1/models", headers=_headers(api_key))
            response = connection.getresponse()
            told = response.read()
            if response.status != http.client.OK:
                raise NoAnswer(f"{url}/v1/models was answered with {response.status}: {_message(told)}")
            return [str(model["id"]) for model in json.loads(told)["data"]]
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
        raise NoAnswer(f"{url} does not list its models: {error!r}") from error


def _connection(url: str) -> http.client.HTTPConnection:
    address = urlsplit(url)
    kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    return kind(address.hostname or "", address.port, timeout=_SILENT_S)


def _headers(api_key: str) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "X-Headrace-Explain": "1"}
    return {**headers, "Authorization": f"Bearer {api_key}"} if api_key else headers


def _message(body: bytes) -> str:
    """Return the words of an error in OpenAI's shape, or the whole body."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body.decode(errors="replace")


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
        """Read a line and execute it. Returns False at the end."""
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


EXAMPLES = """examples:
  headrace chat
  headrace chat --model Qwen/Qwen3-0.6B --system 'Answer in one sentence.'
  headrace chat 'Why is the sky blue?'
  git diff | headrace chat 'Write a commit message:'

Lines that begin with / are commands: /help lists them. Ctrl-C ends an answer, Ctrl-D the chat. Without a terminal one answer
is printed. A key is read from HEADRACE_API_KEY."""


def add_chat(commands: Any, about: str) -> None:
    parser = commands.add_parser(
        "chat",
        help=about,
        description="Talk to a served model. Reaches the deployment that runs with the data folder, or the one at --url.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("text", metavar="TEXT", nargs="?", default="", help="ask only this, and print the answer")
    parser.add_argument("--url", metavar="URL", help="address of the frontend (default: that of the running `headrace up`)")
    parser.add_argument("--model", metavar="NAME", help="model to talk to (default: the first one)")
    parser.add_argument("--system", metavar="TEXT", default="", help="what the model is told first")
    add_setting_flags(parser, "control")
    parser.set_defaults(run=_run, prog="headrace chat")


def _run(parsed: argparse.Namespace) -> int:

    data_dir = read_settings(parsed, "control")["data_dir"]
    return run_chat(data_dir, url=parsed.url, model=parsed.model, system=parsed.system, text=parsed.text)
