"""A runtime with a scripted engine below it and a recording session above (both fakes, no server)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq
from math import inf

from tokenizers import Tokenizer

from headrace.broker.codec import encode, pack_u32
from headrace.broker.messages.frames import Finish, JobFault, TokenLogprob
from headrace.broker.messages.requests import Envelope, Generation, Sampling
from headrace.broker.protocol.run import Run, RunState
from headrace.workers.detokenize import TokenTable
from headrace.workers.engine import Capabilities, EngineInfo, Load, Output, Sequence
from headrace.workers.errors import EngineError
from headrace.workers.runtime.runtime import Runtime
from headrace.workers.sim.tokens import BUNDLED_TOKENIZER
from tests.unit.broker.protocol.test_protocol_runs import FakeDelivery

TABLE = TokenTable.load(str(BUNDLED_TOKENIZER))
INFO = EngineInfo(
    engine="fake",
    version="0",
    tokenizer_dir="",
    context_length=100,
    block_size=32,
    blocks=9,
    slots=9,
    vocab_size=49152,
    eos_token_ids=(2,),
)


def ids_of(text: str) -> list[int]:
    return bundled_tokenizer().encode(text).ids


@functools.cache
def bundled_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(BUNDLED_TOKENIZER / "tokenizer.json"))


class FakeEngine:
    """Takes sequences and says nothing by itself."""

    def __init__(self) -> None:
        self.taken: list[Sequence] = []
        self.aborted: list[str] = []
        self.refuse: EngineError | None = None
        self.death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.named: frozenset[str] = frozenset()
        self.capabilities = Capabilities(
            logprobs=True,
            prompt_logprobs=True,
            guided=frozenset({"json", "regex", "choice", "grammar", "structural_tag", "json_object"}),
            lora="dynamic",
            media=frozenset({"image", "video", "audio"}),
            prompt_embeds=True,
            cache_salt=True,
        )

    async def submit(self, sequence: Sequence) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.taken.append(sequence)

    async def release(self, sequence_id: str, params: object) -> None: ...

    async def abort(self, ids: Seq[str]) -> None:
        self.aborted += ids

    async def died(self) -> str:
        return await self.death

    def blamed(self) -> frozenset[str]:
        return self.named

    def load(self) -> Load:
        return Load()


class FakeSession:
    max_frame_bytes = 512 * 1024

    def __init__(self) -> None:
        self.text: dict[int, str] = {}
        self.ids: dict[int, list[int]] = {}
        self.fins: dict[int, Finish] = {}
        self.logprobs: list[TokenLogprob] = []
        self.failed: list[JobFault] = []
        self.moved: list[JobFault] = []
        self.computed: list[int] = []
        self.flushes = 0

    def append(self, run: Run, choice: int, ids: list[int], texts: list[str], logprobs=None, fin=None) -> None:
        run.append(choice, ids, texts, logprobs, fin)
        assert len(ids) == len(texts)
        self.text[choice] = self.text.get(choice, "") + "".join(texts) + (fin.tail if fin else "")
        self.ids.setdefault(choice, []).extend(ids)
        self.logprobs += logprobs or []
        if fin:
            self.fins[choice] = fin

    def append_token(self, run: Run, choice: int, ids: list[int], text: str) -> None:
        assert len(ids) == 1
        self.append(run, choice, ids, [text])

    def flush(self) -> None:
        self.flushes += 1

    def prefilled(self, run: Run, uncached: int, fetch_ms: int = 0) -> None:
        self.computed.append(uncached)

    def fail(self, run: Run, fault: JobFault) -> None:
        self.failed.append(fault)

    def retry_elsewhere(self, run: Run, fault: JobFault) -> None:
        self.moved.append(fault)


class Bench:
    def __init__(self, runtime: Runtime, engine: FakeEngine, session: FakeSession) -> None:
        self.runtime, self.engine, self.session = runtime, engine, session

    async def start(
        self,
        generation: Generation,
        *,
        choices: int = 1,
        emitted: list[list[int]] | None = None,
        hashes: bytes = b"",
        trace: dict[str, str] | None = None,
    ) -> Run:
        envelope = Envelope(
            id="q",
            pool="p",
            model="m",
            judge="i",
            deadline=9e9,
            created=0.0,
            tokens=3,
            choices=choices,
            block_size=32,
            hashes=hashes,
            trace=trace or {},
        )
        run = Run(envelope=envelope, attempt=2 if emitted else 1, history=[], run=5, delivery=FakeDelivery(1))
        run.begin(emitted or [], [])
        run.state = RunState.RUNNING
        self.runtime.start(run, encode(generation))
        await self.settle()
        return run

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    def step(self, *outputs: Output) -> None:
        self.runtime.on_step(list(outputs))


@contextlib.asynccontextmanager
async def running(*, stall_s: float = 60.0, first_token_s: float = inf) -> AsyncIterator[Bench]:
    engine, session = FakeEngine(), FakeSession()
    runtime = Runtime(engine, stall_s=stall_s, first_token_s=first_token_s)  # type: ignore[arg-type]
    runtime.attach(session, INFO, TABLE)  # type: ignore[arg-type]
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(runtime.run())
        await asyncio.sleep(0)  # The runtime has to run before its first run starts.
        yield Bench(runtime, engine, session)
        task.cancel()


def generation(**options: object) -> Generation:
    sampling = Sampling(max_tokens=options.pop("max_tokens", 20), **options.pop("sampling", {}))  # type: ignore[arg-type]
    return Generation(token_ids=pack_u32([10, 11, 12]), sampling=sampling, **options)  # type: ignore[arg-type]
