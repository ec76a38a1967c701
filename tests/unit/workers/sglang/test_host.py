"""The child's side of SGLang: requests to its manager, chunks to outputs; the manager is a stand-in."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headrace.broker.messages.requests import Sampling
from headrace.workers.engine import EngineInfo, Output, PoolItem, Sequence
from headrace.workers.sglang.host import EngineHost
from headrace.workers.sglang.messages import Abort, Control, LoadReport, PoolInput, Reply, StepOutputs, Stop, Submit
from headrace.workers.sim.tokens import BUNDLED_TOKENIZER


class Request(SimpleNamespace):
    """What SGLang's `GenerateReqInput` and `EmbeddingReqInput` take, without a check."""


class Frames:
    """The connection to the worker: what is sent, and what comes next."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.coming: asyncio.Queue[Any] = asyncio.Queue()

    def send(self, message: Any) -> None:
        self.sent.append(message)

    async def receive(self) -> Any:
        return await self.coming.get()


def chunk(ids: list[int], finish: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"output_ids": ids, "meta_info": {"finish_reason": finish, "cached_tokens": 0, "prompt_tokens": 3}}


class Manager:
    """Answers with two chunks. A request that begins with `bad` is refused, `broken` fails late, `slow` waits for an abort."""

    def __init__(self, *, generates: bool) -> None:
        self.model_config = SimpleNamespace(is_generation=generates)
        self.load_snapshot_reader = SimpleNamespace(read_all=list)
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.pauses: list[str] = []
        self._abort = asyncio.Event()

    async def generate_request(self, request: Request, _raw: None) -> AsyncIterator[dict[str, Any]]:
        self.requests.append(request)
        name = request.rid
        if name.startswith("bad"):
            raise ValueError("the input is too long")
        if not self.model_config.is_generation:
            yield {"embedding": [0.5, 1.0], "meta_info": {"cached_tokens": 2}}
            return
        if name.startswith("slow"):
            await self._abort.wait()
            yield chunk([7], {"type": "abort"})
            return
        yield chunk([5])
        if name.startswith("broken"):
            for _ in range(30):
                await asyncio.sleep(0)
            raise RuntimeError("a scheduler has failed")
        yield chunk([6], {"type": "length", "length": 2})

    def abort_request(self, rid: str) -> None:
        self.aborted.append(rid)
        self._abort.set()

    async def pause_generation(self, request: Request) -> None:
        self.pauses.append(request.mode)

    async def continue_generation(self, request: Request) -> None:
        self.pauses.append("")

    async def flush_cache(self, timeout_s: float) -> Any:
        return SimpleNamespace(success=True)


class Bench:
    def __init__(self, *, generates: bool = True, lora: bool = False) -> None:
        self.manager = Manager(generates=generates)
        self.stopped = False
        args = SimpleNamespace(disaggregation_mode="null", enable_lora=lora, enable_deterministic_inference=False)
        self.engine = SimpleNamespace(tokenizer_manager=self.manager, server_args=args, shutdown=self._shutdown)
        self.frames = Frames()
        info = EngineInfo(
            engine="sglang",
            version="0",
            tokenizer_dir=str(BUNDLED_TOKENIZER),
            context_length=100,
            block_size=32,
            blocks=10,
            slots=4,
            vocab_size=49152,
            eos_token_ids=(2,),
            kinds=("chat",) if generates else ("embedding",),
        )
        self.host = EngineHost(self.engine, info, self.frames)  # type: ignore[arg-type]
        self._serving = asyncio.create_task(self.host.serve())

    def _shutdown(self) -> None:
        self.stopped = True

    def send(self, message: Any) -> None:
        self.frames.coming.put_nowait(message)

    def submit(self, name: str, call: int = 1, *, stop: int | None = None, **options: Any) -> None:
        sampling = Sampling(max_tokens=2, temperature=0.0)
        if stop is not None:
            sampling = Sampling(max_tokens=2, temperature=0.0, ignore_eos=True, stop_token_ids=[stop])
        self.send(Submit(call, Sequence(id=name, token_ids=[1, 3, 4], prompt_tokens=3, sampling=sampling, **options)))

    def reply(self, call: int = 1) -> Reply | None:
        return next((one for one in self.frames.sent if isinstance(one, Reply) and one.call == call), None)

    def outputs(self, name: str) -> list[Output]:
        return [
            output for one in self.frames.sent if isinstance(one, StepOutputs) for output in one.outputs if output.id == name
        ]

    async def until(self, met: Callable[[], Any]) -> None:
        async with asyncio.timeout(5):
            while not met():
                await asyncio.sleep(0)

    async def end(self) -> None:
        self.send(Stop())
        await self._serving


@pytest.fixture(autouse=True)
def io_struct(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module = ModuleType("sglang.srt.managers.io_struct")
    for name in ("GenerateReqInput", "EmbeddingReqInput", "PauseGenerationReqInput", "ContinueGenerationReqInput"):
        setattr(module, name, Request)
    monkeypatch.setitem(sys.modules, module.__name__, module)


async def test_a_sequence_is_accepted_and_its_chunks_become_outputs() -> None:
    bench = Bench()
    bench.submit("a", rank=None)
    await bench.until(lambda: bench.outputs("a") and bench.outputs("a")[-1].finish)
    assert bench.reply() == Reply(1)
    assert [output.ids for output in bench.outputs("a")] == [[5], [6]]
    assert (bench.outputs("a")[0].cached_tokens, bench.outputs("a")[-1].finish) == (0, "length")
    assert bench.manager.requests[0].input_ids == [1, 3, 4]
    await bench.end()
    assert bench.stopped


async def test_the_rank_of_a_sequence_is_asked_of_sglang() -> None:
    bench = Bench()
    bench.submit("a", rank=1)
    await bench.until(lambda: bench.manager.requests)
    assert bench.manager.requests[0].routed_dp_rank == 1
    await bench.end()


async def test_a_request_that_sglang_refuses_at_once_is_the_requests_fault() -> None:
    bench = Bench()
    bench.submit("bad")
    await bench.until(bench.reply)
    reply = bench.reply()
    assert reply is not None
    assert reply.error is not None
    assert (reply.error.kind, reply.error.message) == ("invalid", "the input is too long")
    assert bench.outputs("bad") == []
    await bench.end()


async def test_a_sequence_that_fails_later_ends_with_a_fault_that_another_worker_may_avoid() -> None:
    bench = Bench()
    bench.submit("broken")
    await bench.until(lambda: bench.outputs("broken") and bench.outputs("broken")[-1].fault)
    fault = bench.outputs("broken")[-1].fault
    assert fault is not None
    assert (fault.code, fault.retriable) == ("engine_error", True)
    await bench.end()


async def test_an_aborted_sequence_is_aborted_in_sglang_and_tells_nothing() -> None:
    bench = Bench()
    bench.submit("slow")
    await bench.until(bench.reply)
    bench.send(Abort(["slow", "unknown"]))
    await bench.until(lambda: bench.manager.aborted)
    for _ in range(10):
        await asyncio.sleep(0)
    assert bench.manager.aborted == ["slow."]
    assert bench.outputs("slow") == []
    await bench.end()


async def test_an_adapter_that_is_not_loaded_is_refused_before_sglang_is_asked() -> None:
    bench = Bench(lora=True)
    bench.submit("a", adapter="fr")
    await bench.until(bench.reply)
    reply = bench.reply()
    assert reply is not None
    assert reply.error is not None
    assert (reply.error.kind, reply.error.param) == ("invalid", "model")
    assert bench.manager.requests == []
    await bench.end()


async def test_vectors_come_as_bytes_with_their_cached_tokens() -> None:
    bench = Bench(generates=False)
    bench.send(PoolInput(1, PoolItem(id="p", task="embed", token_ids=[1])))
    await bench.until(bench.reply)
    reply = bench.reply()
    assert reply is not None
    assert reply.value == [np.array([0.5, 1.0], dtype="<f4").tobytes(), 2]
    for call, item in (
        (2, PoolItem(id="q", task="classify", token_ids=[1])),
        (3, PoolItem(id="r", task="embed", token_ids=[1], normalize=False)),
    ):
        bench.send(PoolInput(call, item))
        await bench.until(lambda call=call: bench.reply(call))
        refused = bench.reply(call)
        assert refused is not None
        assert refused.error is not None
        assert refused.error.kind == "unsupported"
    bench.submit("a", call=4)
    await bench.until(lambda: bench.reply(4))
    refused = bench.reply(4)
    assert refused is not None
    assert refused.error is not None
    assert refused.error.kind == "unsupported"
    await bench.end()


async def test_operations_are_done_or_refused_by_name() -> None:
    bench = Bench()
    bench.send(Control(1, "reset_prefix_cache", {}))
    bench.send(Control(2, "load_adapter", {"name": "fr", "source": "/x"}))
    bench.send(Control(3, "dance", {}))
    await bench.until(lambda: bench.reply(3))
    replies = [bench.reply(call) for call in (1, 2, 3)]
    assert replies[0] == Reply(1, True)
    errors = [reply.error for reply in replies[1:] if reply is not None]
    assert [error.kind for error in errors if error is not None] == ["unsupported", "unsupported"]
    await bench.end()


async def test_a_pause_keeps_the_sequences_inside_until_it_is_ended() -> None:
    bench = Bench()
    for call, operation in enumerate(("is_paused", "pause", "is_paused", "resume", "is_paused"), 1):
        bench.send(Control(call, operation, {}))
        await bench.until(lambda call=call: bench.reply(call))  # type: ignore[misc]
    assert bench.manager.pauses == ["in_place", ""]
    values = [reply.value for call in (1, 3, 5) if (reply := bench.reply(call)) is not None]
    assert values == [{"result": False}, {"result": True}, {"result": False}]
    await bench.end()


async def test_a_pause_that_would_end_sequences_is_refused() -> None:
    bench = Bench()
    bench.send(Control(1, "pause", {"mode": "abort"}))
    await bench.until(lambda: bench.reply(1))
    reply = bench.reply(1)
    assert reply is not None
    assert reply.error is not None
    assert (reply.error.kind, "'abort'" in reply.error.message) == ("invalid", True)
    assert bench.manager.pauses == []
    await bench.end()


async def test_an_engine_that_makes_vectors_has_no_pause() -> None:
    bench = Bench(generates=False)
    bench.send(Control(1, "pause", {}))
    await bench.until(lambda: bench.reply(1))
    reply = bench.reply(1)
    assert reply is not None
    assert reply.error is not None
    assert reply.error.kind == "unsupported"
    await bench.end()


async def test_the_load_is_reported_between_steps() -> None:
    bench = Bench()
    await bench.until(lambda: any(isinstance(one, LoadReport) for one in bench.frames.sent))
    await bench.end()


async def test_a_stop_token_that_sglang_does_not_look_at_ends_the_sequence_there() -> None:
    bench = Bench()
    bench.submit("s", stop=5)
    await bench.until(lambda: bench.outputs("s") and bench.manager.aborted)
    for _ in range(5):
        await asyncio.sleep(0)
    assert [(output.ids, output.finish, output.stop) for output in bench.outputs("s")] == [([5], "stop", 5)]
    await bench.end()
