"""The clients of a chaos run, whose requests have known answers, and links that can be cut or slowed down."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self

from headrace.base.http_client import Answer, NoConnection, ask
from headrace.tools.chaos.ledger import AnswerChecker, Ended, Ledger, LedgerEntry, Outcome, divergence
from headrace.tools.chaos.questions import DEADLINE_S, ApiQuestion, Question

# Sends one POST per HTTP/1.1 connection and reports how the exchange ended: complete, cut, or never begun.

_CONNECT_TIMEOUT_S = 10.0


class Cut(Exception):
    """The connection ended before the answer did. `began`: some of the answer had arrived."""

    def __init__(self, why: str, *, began: bool) -> None:
        super().__init__(why)
        self.began = began


class Response:
    def __init__(self, answer: Answer) -> None:
        self.status = answer.status
        self.headers = answer.headers
        self._answer = answer

    async def body(self) -> bytes:
        """Return the whole body. Raises Cut."""
        return b"".join([part async for part in self._parts()])

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the data of each server-sent event. Raises Cut."""
        rest = b""
        async for part in self._parts():
            *events, rest = (rest + part).split(b"\n\n")
            for event in events:
                for line in event.split(b"\n"):
                    if line.startswith(b"data: "):
                        yield line[6:]

    async def _parts(self) -> AsyncIterator[bytes]:
        try:
            async for part in self._answer.pieces():
                yield part
        except OSError as error:
            raise Cut(str(error) or type(error).__name__, began=True) from None


@asynccontextmanager
async def post(
    host: str, port: int, path: str, body: Mapping[str, Any], *, headers: Mapping[str, str] | None = None
) -> AsyncIterator[Response]:
    """Send the request and read the head of the response before the block begins.

    Leaving the block closes the connection, also before the response is complete. Raises Cut, and OSError if no process
    listens.
    """
    sent = {"Content-Type": "application/json", **(headers or {})}
    async with AsyncExitStack() as stack:
        try:
            asking = ask(
                "POST",
                f"http://{host}:{port}{path}",
                headers=sent,
                body=json.dumps(body).encode(),
                connect_s=_CONNECT_TIMEOUT_S,
            )
            answer = await stack.enter_async_context(asking)
        except NoConnection:
            raise
        except OSError as error:
            raise Cut(str(error) or type(error).__name__, began=False) from None
        yield Response(answer)


# Relays the connections between a process and the NATS server over a link that can be cut or slowed down.
#
# A cut link loses no bytes and closes no connection; it carries nothing, as a partition that TCP outlasts. A slow link delays
# everything in both directions, also the replies to lease refreshes, so that a lease's owner has to count from the request.

_CHUNK = 64 * 1024
_MOST_LATE = 256  # chunks that are under way on a slow link, each way of each connection
_PROXY_CONNECT_TIMEOUT_S = 2.0

_END = b""

Late = tuple[float, bytes]
"""The time at which the bytes are due, and the bytes."""


class NetworkProxy:
    """Listens on a port of its own while entered, and relays connections to `host:port`."""

    def __init__(self, host: str, port: int) -> None:
        self._to = (host, port)
        self._open = asyncio.Event()
        self._open.set()
        self._late_s = 0.0
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, self._to[0], 0)
        return self

    async def __aexit__(self, *_raised: object) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    @property
    def url(self) -> str:
        """Return the URL of this link for a NATS client. Raises RuntimeError if the link is not open."""
        if self._server is None:
            raise RuntimeError("the link is not open")
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"nats://{host}:{port}"

    def cut(self) -> None:
        """Carry nothing until `mend`."""
        self._open.clear()

    def slow(self, late_s: float) -> None:
        """Carry everything this much later."""
        self._late_s = late_s

    def mend(self) -> None:
        self._late_s = 0.0
        self._open.set()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A task of our own: asyncio looks at the outcome of its own ones as if they could not be cancelled.
        task = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_PROXY_CONNECT_TIMEOUT_S):
                there = await asyncio.open_connection(*self._to)
        except (OSError, TimeoutError):
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
            return
        away, back = (asyncio.Queue[Late](_MOST_LATE) for _ in range(2))
        ways = ((reader, away, there[1]), (there[0], back, writer))
        tasks = [asyncio.create_task(self._take(source, queue)) for source, queue, _ in ways]
        tasks += [asyncio.create_task(self._deliver(queue, sink)) for _, queue, sink in ways]
        try:
            await asyncio.wait(tasks[2:], return_when=asyncio.FIRST_COMPLETED)
        finally:
            writer.close()  # before anything that can be cancelled
            there[1].close()
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(writer.wait_closed(), there[1].wait_closed(), return_exceptions=True)

    async def _take(self, reader: asyncio.StreamReader, queue: asyncio.Queue[Late]) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            while chunk := await reader.read(_CHUNK):
                await queue.put((loop.time() + self._late_s, chunk))
        await queue.put((0.0, _END))

    async def _deliver(self, queue: asyncio.Queue[Late], writer: asyncio.StreamWriter) -> None:
        """Write each chunk when it is due. Returns when the source has ended or the receiver has closed."""
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            while True:
                due_s, chunk = await queue.get()
                if chunk == _END:
                    return
                if (wait_s := due_s - loop.time()) > 0:
                    await asyncio.sleep(wait_s)
                await self._open.wait()
                writer.write(chunk)
                await writer.drain()


_GIVE_UP_S = DEADLINE_S + 20.0
_AFTER_REFUSAL_S = 0.3
_AVOID_S = 2.0  # An unreachable frontend gets no requests for so long, if there is another one.
_LEAVING = ("draining", "cancelled")  # error codes of a frontend that shuts down during an answer
_CODE_POISON = "poison"
_CRASHED = "crashed"


@dataclass(frozen=True, slots=True)
class Address:
    name: str
    host: str
    port: int


class LedgerClient:
    """Keeps a number of requests open until `stop`, each at the next frontend in turn."""

    def __init__(
        self,
        ledger: Ledger,
        questions: Iterator[Question | ApiQuestion],
        frontends: Sequence[Address],
        *,
        model: str,
        clock: Callable[[], float],
    ) -> None:
        self._ledger = ledger
        self._questions = questions
        self._frontends = frontends
        self._model = model
        self._clock = clock
        self._stopping = asyncio.Event()
        self._avoid_until_s: dict[str, float] = {}

    def stop(self) -> None:
        self._stopping.set()

    async def run(self, clients: int) -> None:
        """Keep `clients` requests open. Returns once `stop` was called and every request has ended."""
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(self._ask_repeatedly())

    async def _ask_repeatedly(self) -> None:
        while not self._stopping.is_set():
            entry = await self.ask(next(self._questions))
            if entry.outcome in (Outcome.REFUSED, Outcome.UNREACHED, Outcome.CUT):
                await asyncio.sleep(_AFTER_REFUSAL_S)

    async def ask(self, question: Question | ApiQuestion) -> LedgerEntry:
        """Send one request and record its end."""
        frontend = self._choose(question.number)
        entry = self._ledger.begin(LedgerEntry(question.number, frontend.name, self._clock(), stream=question.stream))
        try:
            async with asyncio.timeout(_GIVE_UP_S):
                ended = await self._exchange(question, frontend, entry)
        except Cut as error:
            ended = Ended(Outcome.CUT, str(error))
        except TimeoutError:
            ended = Ended(Outcome.LOST, f"no end within {_GIVE_UP_S:g} s, its deadline was {DEADLINE_S:g} s")
        except OSError as error:
            self._avoid_until_s[frontend.name] = self._clock() + _AVOID_S
            ended = Ended(Outcome.UNREACHED, str(error))
        entry.end(ended.outcome, self._clock(), ended.detail)
        return entry

    def _choose(self, number: int) -> Address:
        """Choose the frontends in turn and leave out unreachable ones, as a load balancer with health checks does."""
        now = self._clock()
        up = [frontend for frontend in self._frontends if self._avoid_until_s.get(frontend.name, 0.0) <= now]
        among = up or self._frontends
        return among[number % len(among)]

    async def _exchange(self, question: Question | ApiQuestion, frontend: Address, entry: LedgerEntry) -> Ended:
        headers = {"x-request-timeout-s": f"{DEADLINE_S:g}"}
        async with post(frontend.host, frontend.port, question.path, question.body(self._model), headers=headers) as response:
            entry.id = response.headers.get("x-request-id", "")
            if response.status != 200:
                return refusal(response.status, response.headers, await response.body())
            if question.stream:
                return await self._read_stream(question, response, entry)
            answer = json.loads(await response.body())
            if isinstance(question, ApiQuestion):
                return AnswerChecker(question).check_whole(answer)
            return check_answer(question, answer)

    async def _read_stream(self, question: Question | ApiQuestion, response: Response, entry: LedgerEntry) -> Ended:
        checker = AnswerChecker(question) if isinstance(question, ApiQuestion) else StreamChecker(question)
        async for data in response.events():
            if data == b"[DONE]":
                return checker.ended()
            event = json.loads(data)
            if not entry.id:
                entry.id = str(event.get("id", "")).removeprefix("cmpl-")
            if (broken := checker.feed(event)) is not None:
                return broken
            if event.get("choices") or str(event.get("type")).endswith("delta"):
                entry.came.append(self._clock())
            if question.cancel_after is not None and len(entry.came) > question.cancel_after:
                return checker.check_so_far() or Ended(Outcome.CANCELLED)
            if checker.complete:
                return checker.ended()
        return Ended(Outcome.LOST, "the stream ended without [DONE]")


class StreamChecker:
    """Compares a streamed completion with the expected texts, piece by piece."""

    complete = False  # Such a stream ends with [DONE], not with an event of its own.

    def __init__(self, question: Question) -> None:
        self._question = question
        self._texts = [""] * question.choices
        self._finishes: list[str | None] = [None] * question.choices
        self._usage: dict[str, Any] | None = None

    def feed(self, event: dict[str, Any]) -> Ended | None:
        """Add one event. Returns the end if the event is an error or shows that the answer is wrong, else None."""
        if "error" in event:
            return classify_late_error(event["error"])
        self._usage = event.get("usage") or self._usage
        for choice in event["choices"]:
            index = choice["index"]
            if self._finishes[index] is not None and choice["text"]:
                return Ended(Outcome.DUPLICATED, f"choice {index} went on after its end: {choice['text']!r}")
            self._texts[index] += choice["text"]
            self._finishes[index] = choice["finish_reason"] or self._finishes[index]
            wrong = divergence(self._texts[index], self._question.texts[index])
            if wrong is not None and wrong.sure:
                return Ended(wrong.outcome, f"choice {index} {wrong.detail}")
        return None

    def check_so_far(self) -> Ended | None:
        """Compare the texts so far with the beginnings of the expected ones. Returns None if they agree."""
        for index, (text, expected) in enumerate(zip(self._texts, self._question.texts, strict=True)):
            if (wrong := divergence(text, expected)) is not None:
                return Ended(wrong.outcome, f"choice {index} {wrong.detail}")
        return None

    def ended(self) -> Ended:
        choices = [
            {"index": i, "text": text, "finish_reason": finish}
            for i, (text, finish) in enumerate(zip(self._texts, self._finishes, strict=True))
        ]
        return check_answer(self._question, {"choices": choices, "usage": self._usage})


def check_answer(question: Question, answer: dict[str, Any]) -> Ended:
    """Check a whole answer: texts, finish reasons and token counts."""
    choices = {choice["index"]: choice for choice in answer["choices"]}
    if sorted(choices) != list(range(question.choices)):
        return Ended(Outcome.WRONG, f"choices {sorted(choices)} instead of {question.choices}")
    for index, expected in enumerate(question.texts):
        text, finish = choices[index]["text"], choices[index]["finish_reason"]
        if (wrong := divergence(text, expected)) is not None:
            return Ended(wrong.outcome, f"choice {index} {wrong.detail}")
        if text != expected:
            return Ended(Outcome.MISSING, f"choice {index} ended ({finish}) after {len(text)} of {len(expected)} characters")
        if finish != question.finishes[index]:
            return Ended(Outcome.WRONG, f"choice {index} ended with {finish!r} instead of {question.finishes[index]!r}")
    usage = answer.get("usage") or {}
    counted = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
    wanted = (len(question.prompt), question.completion_tokens)
    if counted[0] != wanted[0] or (wanted[1] is not None and counted[1] != wanted[1]):
        return Ended(Outcome.WRONG, f"usage says {counted} prompt and answer tokens instead of {wanted}")
    return Ended(Outcome.ANSWERED)


def refusal(status: int, headers: dict[str, str], body: bytes) -> Ended:
    """Classify an error response, which has a status other than 200."""
    try:
        error = json.loads(body)["error"]
        code, typed = error.get("code"), bool(error["type"] and error["message"])  # Anthropic's errors have no code
    except (ValueError, KeyError, TypeError):
        return Ended(Outcome.FAILED, f"status {status} without a typed error: {body[:200]!r}")
    detail = f"status {status}, {code}: {error['message']}"
    if code == _CODE_POISON or (code is None and _CRASHED in error["message"]):
        return Ended(Outcome.POISONED, detail)
    if status in (429, 503, 529) and typed and headers.get("x-should-retry") != "false":
        return Ended(Outcome.REFUSED, detail)
    return Ended(Outcome.FAILED, detail)


def classify_late_error(error: dict[str, Any]) -> Ended:
    code = error.get("code")
    detail = f"after the first tokens, {code}: {error.get('message')}"
    if code == _CODE_POISON:
        return Ended(Outcome.POISONED, detail)
    return Ended(Outcome.CUT if code in _LEAVING else Outcome.FAILED, detail)
