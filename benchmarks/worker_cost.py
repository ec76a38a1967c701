"""Measures a worker alone: CPU per request, without NATS, frontend or network.

A made-up broker in the same process keeps `--streams` requests under way: it hands them to the worker as a server would, stores
what the worker places on itself, and confirms every end.  So the numbers hold the worker's half of the job protocol, its
runtime and the simulated engine with the `instant` timing, and a little for the broker that is made up.

    python -m benchmarks.worker_cost [--requests 4000] [--streams 64] [--tokens 16] [--prompt-tokens 110] [--runs 3] [--profile]

Prints microseconds per request, a line per run.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Container, Mapping
from typing import Any

from benchmarks.profiling import parse_and_run
from headrace.broker.blocks import block_chain
from headrace.broker.codec import decode, encode, pack_u32, pack_u64
from headrace.broker.messages.control import Answers, RunVerdict
from headrace.broker.messages.frames import Frame
from headrace.broker.messages.members import WorkerMember
from headrace.broker.messages.requests import Envelope, Generation, Sampling
from headrace.broker.settings import SessionSettings
from headrace.broker.worker.ports import EnginePorts
from headrace.broker.worker.session import WorkerSession
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.ports import Change, Delivery, Entry, Message, PubAck
from headrace.jetstream.subjects import Subjects
from headrace.workers.detokenize import TokenTable
from headrace.workers.engine import EngineConfig, Role
from headrace.workers.kv.feed import KvFeed
from headrace.workers.kv.publisher import KvPublisher
from headrace.workers.kv.translator import Translator
from headrace.workers.runtime.runtime import Runtime
from headrace.workers.sim.engine import SimEngine

POOL, WORKER, JUDGE = "bench-0", "w-1", "i-1"
MAX_PAYLOAD = 1 << 20


class StoredMessage:
    """A delivery whose ack goes nowhere."""

    num_delivered, pending = 1, 0

    def __init__(self, subject: str, data: bytes, seq: int, headers: Mapping[str, str]) -> None:
        self.subject, self.data, self.stream_seq, self.headers = subject, data, seq, headers

    def ack(self) -> None:
        pass

    def nak(self, delay_s: float = 0.0) -> None:
        raise AssertionError("given back")

    def progress(self) -> None:
        pass

    def term(self, reason: str = "") -> None:
        raise AssertionError(reason)


class Pull:
    """A pull loop that is fed by hand."""

    def __init__(self, on_delivery: Callable[[Delivery], None], refill: Callable[[], None]) -> None:
        self._on_delivery, self._refill = on_delivery, refill
        self.credit = 0

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def stop(self) -> None:
        pass

    def add_credit(self, n: int = 1) -> None:
        self.credit += n
        self._refill()

    def deliver(self, message: StoredMessage) -> None:
        self.credit -= 1
        self._on_delivery(message)


class Watch:
    """Reports one live ingress and nothing else."""

    def __init__(self, on_change: Callable[[Change], None], key: str) -> None:
        self._on_change, self._key = on_change, key

    async def run(self) -> None:
        self._on_change(Change(self._key, b"", 1))
        await asyncio.Event().wait()

    async def ready(self, timeout_s: float) -> None:
        pass


class Bucket:
    """Takes everything."""

    def __init__(self, key: str) -> None:
        self._key = key

    async def get(self, key: str) -> Entry | None:
        return Entry(key, b"", 1)

    async def write(self, *_: Any, **__: Any) -> int:
        return 1

    put = create = update = delete = write

    def watch(self, on_change: Callable[[Change], None], pattern: str = ">") -> Watch:
        return Watch(on_change, self._key)


class Broker:
    """Just enough of `headrace.jetstream.ports.Messaging`. `jobs` are the envelopes to come; `ended` is set when all
    have ended."""

    connected, connected_since_s, max_payload = True, 0.0, MAX_PAYLOAD

    def __init__(self, subjects: Subjects) -> None:
        self._subjects = subjects
        self._handlers: dict[str, Callable[[Message], None]] = {}
        self._pulls: dict[str, Pull] = {}
        self._work: deque[StoredMessage] = deque()
        self._seq = 0
        self._scheduled = False
        self._loop = asyncio.get_running_loop()
        self.jobs: deque[bytes] = deque()
        self.left = 0
        self.ended = asyncio.Event()

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> Callable[[], None]:
        return lambda: None

    def send(self, subject: str, data: bytes, *, reply: str = "") -> None:
        if subject != self._subjects.out(JUDGE):
            return
        done = [RunVerdict(row.id, row.attempt, row.run, "done") for row in decode(Frame, data).rows if row.fin is not None]
        if done:
            control = self._subjects.control(WORKER)
            self._loop.call_soon(self._handlers[control], Message(control, encode(Answers(answers=done)), "", None))
            self.left -= len(done)
            if not self.left:
                self.ended.set()

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        raise NotImplementedError

    async def subscribe(self, subject: str, on_message: Callable[[Message], None], *, queue: str = "") -> None:
        self._handlers[subject] = on_message

    async def publish(self, subject: str, data: bytes, **options: Any) -> PubAck:
        await asyncio.sleep(0)
        self._seq += 1
        if subject == self._subjects.work(POOL, WORKER):
            self._work.append(StoredMessage(subject, data, self._seq, options.get("headers") or {}))
            self.refill()
        return PubAck("S", self._seq, False)

    def pull(self, stream: str, consumer: str, on_delivery: Callable[[Delivery], None], **_: Any) -> Pull:
        self._pulls[consumer] = Pull(on_delivery, self.refill)
        return self._pulls[consumer]

    async def ensure_consumer(self, spec: object) -> None:
        pass

    async def subject_counts(self, stream: str, pattern: str) -> dict[str, int]:
        return {}

    async def consumer_subjects(self, stream: str) -> dict[str, tuple[str, ...]]:
        return {}

    def bucket(self, name: str) -> Bucket:
        return Bucket(self._subjects.ingress_key(JUDGE))

    def refill(self) -> None:
        """Hand out what there is credit for, in the next turn of the loop."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._hand_out)

    def _hand_out(self) -> None:
        self._scheduled = False
        work, requests = (
            self._pulls[self._subjects.work_consumer(WORKER)],
            self._pulls[self._subjects.req_consumer(POOL, "std")],
        )
        while self._work and work.credit > 0:
            work.deliver(self._work.popleft())
        while self.jobs and requests.credit > 0:
            self._seq += 1
            requests.deliver(StoredMessage(self._subjects.req(POOL, "std"), self.jobs.popleft(), self._seq, {}))


def envelopes(args: argparse.Namespace, first: int) -> deque[bytes]:
    """Requests with prompts of their own."""
    found: deque[bytes] = deque()
    now = time.time()
    for n in range(first, first + args.requests):
        rng = random.Random(n)
        packed = pack_u32([rng.randrange(100, 40_000) for _ in range(args.prompt_tokens)])
        sampling = Sampling(max_tokens=args.tokens, temperature=0.0, ignore_eos=True)
        envelope = Envelope(
            id=f"{n:026x}",
            pool=POOL,
            model="bench",
            judge=JUDGE,
            deadline=now + 600,
            created=now,
            tokens=args.prompt_tokens,
            max_tokens=args.tokens,
            block_size=16,
            hashes=pack_u64(block_chain(packed, 16)),
            payload=encode(Generation(token_ids=packed, sampling=sampling)),
        )
        found.append(encode(envelope))
    return found


async def measure(args: argparse.Namespace) -> None:
    """Print the figure of each run."""
    subjects = Subjects()
    broker: Any = Broker(subjects)  # has what is called here of the port, and no more
    engine = SimEngine()
    runtime = Runtime(engine, stall_s=60.0)
    info = await engine.start(
        EngineConfig(model="bench", served_name="bench", role=Role.AGGREGATED, args={"slots": args.streams}), runtime.on_step
    )
    member = WorkerMember(
        worker=WORKER,
        pool=POOL,
        model="bench",
        slots=info.slots,
        block_size=info.block_size,
        blocks=info.blocks,
        epoch=1,
        started=time.time(),
        engine="sim",
    )
    translator = Translator(info.block_size, blocks=info.blocks)
    publisher = KvPublisher(broker, subjects, pool=POOL, worker=WORKER, epoch=1, inventory=translator.inventory)

    def cache() -> Container[int]:
        return translator.device

    runtime.watch_cache(cache, tiers=list)
    feed = KvFeed(engine, translator, publisher.step)
    deps = WorkerDeps(messaging=broker, subjects=subjects, settings=SessionSettings(slots=info.slots))
    session = WorkerSession(deps, member, EnginePorts(executor=runtime, kv=publisher))
    runtime.attach(session.runs, info, TokenTable.load(info.tokenizer_dir))
    async with asyncio.TaskGroup() as tasks:
        parts = [tasks.create_task(part) for part in (runtime.run(), feed.run(), session.run())]
        await session.wait_registered(10.0)
        await asyncio.sleep(0.1)
        await run(broker, envelopes(args, 0))
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 50)
        for n in range(1, args.runs + 1):
            jobs = envelopes(args, n * args.requests)
            began = time.process_time()
            await run(broker, jobs)
            print(f"{(time.process_time() - began) / args.requests * 1e6:.1f}")
        for part in parts:
            part.cancel()
    await engine.stop(0.0)


async def run(broker: Broker, jobs: deque[bytes]) -> None:
    """Run all of these, to their ends."""
    broker.left = len(jobs)
    broker.ended.clear()
    broker.jobs = jobs
    broker.refill()
    await broker.ended.wait()


def main() -> None:
    """Parse the flags and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=110)
    parser.add_argument("--runs", type=int, default=3)
    parse_and_run(parser, measure, lines=45)


if __name__ == "__main__":
    main()
