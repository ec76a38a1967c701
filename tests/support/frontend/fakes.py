"""A fake ingress (no broker, no worker: rows come from a script) and a hand-driven ASGI client."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from headrace.broker.batches.service import Batches
from headrace.broker.batches.settings import BatchSettings
from headrace.broker.batches.store import BatchStore, StoredFiles
from headrace.broker.errors import UnknownModel
from headrace.broker.files.store import FileStore
from headrace.broker.files.uploads import UploadStore
from headrace.broker.ingress.timeline import RequestTimeline
from headrace.broker.jobs import Job
from headrace.broker.messages.control import Explanation
from headrace.broker.messages.frames import Finish, Row, TokenLogprob
from headrace.broker.models.cards import ModelCard
from headrace.frontend.apis import Stores
from headrace.frontend.app import Frontend, build_frontend
from headrace.frontend.files import file_limits
from headrace.frontend.ports import RecordPort, ResponsePort, StoredJobPort
from headrace.frontend.request_audit import Notes
from headrace.frontend.settings import FrontendSettings
from headrace.jetstream.subjects import Subjects
from tests.support.memory_store import MemoryMessaging

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
MODEL = "org/tiny"


def byte_tokenizer() -> bytes:
    """One token per byte, ids 0 to 255 in the order of the byte alphabet; </s> is 256."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer.to_str().encode()


TOKENIZER = byte_tokenizer()
CARD = ModelCard(
    model=MODEL,
    pool="org-tiny-00000000",
    context_length=512,
    block_size=16,
    vocab_size=257,
    eos_token_ids=[256],
    eos_token="</s>",
    aliases=["tiny"],
    created=1_700_000_000.0,
)
FILES = {"tokenizer.json": TOKENIZER, "chat_template.jinja": TEMPLATE.encode()}

Step = list[Row] | Exception
Script = Callable[[Job], Iterable[Step]]


def row(
    text: str = "",
    *,
    choice: int = 0,
    ids: list[int] | None = None,
    fin: Finish | None = None,
    logprobs: list[TokenLogprob] | None = None,
) -> Row:
    return Row("job", 1, 7, choice, 0, [65] if ids is None else ids, [text], logprobs, fin)


def end(reason: str = "stop", **more: Any) -> Finish:
    return Finish(reason=reason, **more)  # type: ignore[arg-type]


def say(*texts: str, **finish: Any) -> Script:
    """Every choice says these texts, one row each, then ends."""

    def script(job: Job) -> Iterable[Step]:
        for i, text in enumerate(texts):
            last = i == len(texts) - 1
            yield [row(text, choice=c, fin=end(**finish) if last else None) for c in range(job.choices)]

    return script


@dataclass
class FakeServed:
    card: ModelCard
    files: Mapping[str, bytes]
    workers: int = 1
    adapter: str | None = None
    name: str = ""  # "" = the model's own

    def __post_init__(self) -> None:
        self.name = self.name or self.card.model


@dataclass
class FakeModels:
    served: dict[str, FakeServed] = field(default_factory=lambda: {MODEL: FakeServed(CARD, FILES)})
    callbacks: list[Callable[[], None]] = field(default_factory=list)

    def names(self) -> list[str]:
        return sorted(self.served)

    def ready_names(self) -> list[str]:
        return sorted(n for n, s in self.served.items() if s.workers)

    def offered_names(self) -> list[str]:
        return self.ready_names()

    def listed_names(self) -> list[str]:
        ready = [served.card for served in self.served.values() if served.workers]
        return [*self.ready_names(), *(alias for card in ready for alias in card.aliases)]

    def get(self, name: str) -> FakeServed:
        for served in self.served.values():
            if name == served.card.model or name in served.card.aliases:
                return dataclasses.replace(served, name=name)
        raise UnknownModel(name, tuple(self.offered_names()))

    def on_change(self, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)


class FakeAnswer:
    """Hands out what was pushed, step by step. Waits for ever when nothing is left."""

    def __init__(self, steps: Iterable[Step]) -> None:
        self._steps = deque(steps)
        self._more = asyncio.Event()
        self.cancelled = False
        self.reads = 0
        self.timeline: RequestTimeline | None = None

    def push(self, *steps: Step) -> None:
        self._steps.extend(steps)
        self._more.set()

    async def rows(self) -> list[Row]:
        self.reads += 1
        while not self._steps:
            self._more.clear()
            await self._more.wait()
        step = self._steps.popleft()
        if isinstance(step, Exception):
            raise step
        return step

    def cancel(self) -> None:
        self.cancelled = True


class FakeIngress:
    def __init__(self, script: Script | None = None) -> None:
        self.script = script or say("Hello", " world")
        self.models = FakeModels()
        self.ready = self.storing = True
        self.refusal: Exception | None = None
        self.jobs: list[Job] = []
        self.answers: list[FakeAnswer] = []
        self.explanation = Explanation(id="", known=False)
        self.explained: list[str] = []
        self.open_names: set[tuple[str, str]] = set()
        self.asked_to_cancel: list[tuple[str, str]] = []
        self.id = "i-fake"
        self.dead: set[str] = set()  # other ingresses

    @property
    def trouble(self) -> str:
        return "" if self.ready else "has no connection to the broker"

    async def cancel(self, name: str, tenant: str, *, timeout_s: float) -> bool:
        self.asked_to_cancel.append((name, tenant))
        return (name, tenant) in self.open_names

    async def judge_gone(self, ingress: str) -> bool:
        return ingress in self.dead

    async def explain(self, request_id: str, *, timeout_s: float) -> Explanation:
        self.explained.append(request_id)
        return self.explanation

    async def submit(self, job: Job) -> FakeAnswer:
        await asyncio.sleep(0)
        self.jobs.append(job)
        if self.refusal is not None:
            raise self.refusal
        answer = FakeAnswer(self.script(job))
        self.answers.append(answer)
        return answer


def frontend(
    ingress: FakeIngress,
    messaging: MemoryMessaging | None = None,
    *,
    notes: Notes | None = None,
    responses: ResponsePort | None = None,
    records: RecordPort | None = None,
    jobs: StoredJobPort | None = None,
    adapters: Any = None,
    **settings: Any,
) -> Frontend:
    """Files and batches are kept in memory; other stores there are none but those given."""
    wishes = FrontendSettings(**settings)
    store: Any = messaging or MemoryMessaging()
    subjects = Subjects("hr")
    files = FileStore(store, subjects, file_limits(wishes), now=store.clock)
    uploads = UploadStore(store, subjects, files, now=store.clock)
    batch_records = BatchStore(store, subjects, keep_s=100.0)
    batches = Batches(batch_records, StoredFiles(files), BatchSettings(), me="i-1", wall=store.clock)
    stores = Stores(uploads=uploads, batches=batches, notes=notes, responses=responses, records=records, jobs=jobs)
    return build_frontend(ingress, wishes, stores=stores, adapters=adapters)


class Call:
    """One request, driven by hand: what was sent is in `sent`; `gate` holds sends back, `leave` closes the connection."""

    def __init__(
        self,
        app: Any,
        path: str,
        body: Any = None,
        *,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
        parts: Iterable[bytes] | None = None,
    ) -> None:
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        path, _, query = path.partition("?")
        self._parts = deque(parts if parts is not None else [raw])
        self._app = app
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": query.encode(),
            "headers": [(k.encode(), v.encode()) for k, v in {**self._usual(body, raw), **(headers or {})}.items()],
            "server": ("test", 80),
            "client": ("test", 1),
        }
        self.sent: list[dict[str, Any]] = []
        self.received = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self._left = asyncio.Event()
        self._news = asyncio.Event()

    @staticmethod
    def _usual(body: Any, raw: bytes) -> dict[str, str]:
        """Headers that every client sends."""
        length = {"content-type": "application/json", "content-length": str(len(raw))} if body is not None else {}
        return {"host": "127.0.0.1", **length}

    async def _receive(self) -> dict[str, Any]:
        if self._parts:
            self.received += 1
            part = self._parts.popleft()
            return {"type": "http.request", "body": part, "more_body": bool(self._parts)}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        await self.gate.wait()
        self.sent.append(message)
        self._news.set()

    def leave(self) -> None:
        self._left.set()

    async def run(self) -> Call:
        await asyncio.wait_for(self._app(self.scope, self._receive, self._send), 5)
        return self

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():
                self._news.clear()
                await asyncio.sleep(0.001)

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None

    @property
    def headers(self) -> dict[str, str]:
        return {k.decode(): v.decode() for k, v in self.sent[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.sent[1:])

    @property
    def complete(self) -> bool:
        return len(self.sent) > 1 and not self.sent[-1].get("more_body", False)

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json()["error"]

    def events(self) -> list[Any]:
        """The data of all events; [DONE] and comments as text."""
        found: list[Any] = []
        for block in self.body.decode().split("\n\n"):
            if block.startswith("data: {"):
                found.append(json.loads(block[6:]))
            elif block:
                found.append(block.removeprefix("data: "))
        return found


def chat(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **more}


async def post(app: Any, body: Any, path: str = "/v1/chat/completions", **more: Any) -> Call:
    return await Call(app, path, body, **more).run()


async def get(app: Any, path: str) -> Call:
    return await Call(app, path, method="GET").run()
