"""Measures the HTTP surface alone: CPU per request and per streamed event, without NATS, engine or network.

A fake ingress answers at once with made-up rows, one per token, and the ASGI application is called in process, so the numbers
hold this package plus Starlette's routing and nothing else: validation, chat template, tokenising, block hashes, events.  With
`--http` the bytes of an HTTP request go through uvicorn's protocol to a transport that only counts, so that parsing and framing
are in the numbers and the kernel is not.

    python -m benchmarks.ingress.cost [--http] [--requests 2000] [--prompt-words 20] [--batch 1] [--profile]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import uvicorn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from uvicorn.server import ServerState

from benchmarks.profiling import parse_and_run
from headrace.broker.errors import UnknownModel
from headrace.broker.jobs import Job
from headrace.broker.messages.frames import Finish, Row
from headrace.broker.models.cards import ModelCard
from headrace.frontend.app import build_frontend
from headrace.frontend.http.connections import Connections
from headrace.frontend.metrics import Metrics
from headrace.frontend.settings import FrontendSettings

WORDS = "the water that turns a mill wheel comes through a narrow channel from the pond above it".split()  # noqa: SIM905
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tokenizer() -> bytes:
    """Train a byte-level BPE on a line: the same machinery as a real one, with fewer merges."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        show_progress=False,
        vocab_size=2000,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tok.train_from_iterator([" ".join(WORDS)] * 50, trainer)
    return tok.to_str().encode()


class Served:
    """The one model."""

    def __init__(self, card: ModelCard, files: Mapping[str, bytes]) -> None:
        self.card, self.files, self.workers = card, files, 1
        self.adapter = None


class Models:
    """A directory with one model."""

    def __init__(self, served: Served) -> None:
        self._served = served

    def names(self) -> list[str]:
        return [self._served.card.model]

    def ready_names(self) -> list[str]:
        return self.names()

    def get(self, name: str) -> Served:
        if name != self._served.card.model:
            raise UnknownModel(name)
        return self._served

    def on_change(self, callback: Callable[[], None]) -> None:
        pass


class Answer:
    """Hands out `batch` rows per read."""

    timeline = None

    def __init__(self, tokens: int, batch: int) -> None:
        rows = [Row("x", 1, 1, 0, i, [i], [" word"]) for i in range(tokens - 1)]
        rows.append(Row("x", 1, 1, 0, tokens - 1, [1], [" end"], None, Finish(reason="length", completion_tokens=tokens)))
        self._steps = deque(rows[i : i + batch] for i in range(0, tokens, batch))

    async def rows(self) -> list[Row]:
        await asyncio.sleep(0)
        return self._steps.popleft()

    def cancel(self) -> None:
        pass


class FakeIngress:
    """Answers at once, with rows made up beforehand."""

    id = "i-bench"
    ready = True

    def __init__(self, files: Mapping[str, bytes], batch: int) -> None:
        card = ModelCard(model="bench", pool="bench-0", context_length=8192, block_size=16, vocab_size=2000)
        self.models = Models(Served(card, files))
        self._batch = batch

    async def submit(self, job: Job) -> Answer:
        await asyncio.sleep(0)
        return Answer(job.max_tokens, self._batch)


async def call(app: Any, body: bytes) -> int:
    """Send one request. Returns the bytes of the answer."""
    size = 0
    gone = asyncio.get_running_loop().create_future()
    first = True

    async def receive() -> dict[str, Any]:
        nonlocal first
        if first:
            first = False
            return {"type": "http.request", "body": body, "more_body": False}
        await gone
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal size
        size += len(message.get("body", b""))

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": [(b"host", b"x"), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))],
    }
    await app(scope, receive, send)
    return size


def body(tokens: int, words: int, *, stream: bool) -> bytes:
    """Return a chat request as JSON."""
    text = " ".join(WORDS[i % len(WORDS)] for i in range(words))
    request = {"model": "bench", "messages": [{"role": "user", "content": text}], "max_tokens": tokens, "stream": stream}
    return json.dumps(request).encode()


class CountingTransport(asyncio.Transport):
    """A socket that takes everything at once."""

    def __init__(self) -> None:
        super().__init__()
        self.written = 0
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += len(data)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


def over_http(app: Any) -> Callable[[Any, bytes], Awaitable[int]]:
    """Return a function like `call` that speaks HTTP/1.1 on one kept-alive connection."""
    config = uvicorn.Config(app, http="httptools", ws="none", lifespan="off", log_config=None, access_log=False)
    config.load()
    state = ServerState()
    protocol = Connections(FrontendSettings(), Metrics()).protocol()(config, state, {})
    transport = CountingTransport()
    protocol.connection_made(transport)

    async def send(_: Any, raw: bytes) -> int:
        before, answered = transport.written, state.total_requests
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        protocol.data_received(head + b"content-length: %d\r\n\r\n" % len(raw) + raw)
        while state.total_requests == answered:
            await asyncio.sleep(0)
        return transport.written - before

    return send


async def measure(args: argparse.Namespace) -> None:
    """Print the table."""
    files = {"tokenizer.json": tokenizer(), "chat_template.jinja": TEMPLATE.encode()}
    built = build_frontend(FakeIngress(files, args.batch), FrontendSettings(access_log=args.access_log))
    ask = over_http(built.app) if args.http else call
    await ask(built.app, body(4, args.prompt_words, stream=True))
    gc.collect()
    gc.freeze()
    if args.gc:
        gc.set_threshold(20_000, 20, 50)
    print(f"prompt of {args.prompt_words} words, {args.batch} rows per wake, {args.requests} requests one after the other")
    print("| tokens | streamed | CPU per request (us) | per chunk beyond 1 token (us) |\n|---|---|---|---|")
    for stream in (True, False):
        base = 0.0
        for tokens in (1, 16, 128):
            raw = body(tokens, args.prompt_words, stream=stream)
            began = time.process_time()
            for _ in range(args.requests):
                await ask(built.app, raw)
            cost = (time.process_time() - began) / args.requests * 1e6
            base = base or cost
            each = f"{(cost - base) / (tokens - 1):.2f}" if tokens > 1 else ""
            print(f"| {tokens} | {'yes' if stream else 'no'} | {cost:.0f} | {each} |")


def main() -> None:
    """Parse the flags and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--http", action="store_true")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--prompt-words", type=int, default=20)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--access-log", action="store_true")
    parser.add_argument("--no-gc-tuning", dest="gc", action="store_false")
    parse_and_run(parser, measure, lines=30)


if __name__ == "__main__":
    main()
