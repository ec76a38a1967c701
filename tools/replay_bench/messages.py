"""The messages of a pool as the benchmark's workers and routers would send them."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.broker.codec import pack_u64
from headrace.broker.messages import EventKind, JobEvent, LoadReport
from headrace.router.index.types import CacheView
from headrace.router.placement.types import Placement, Waiting, WorkerInfo
from headrace.tools.replay_bench.engine import EngineModel, ModelledEngine, ReplayJob
from headrace.tools.replay_bench.trace import BLOCK_TOKENS

MOST_HASHES = 512  # in one `placed` event


def worker_name(index: int) -> str:
    """Name the worker with this place in the pool."""
    return f"worker-{index}"


def worker_info(name: str, model: EngineModel, *, fleet: str = "", price: float = 0.0) -> WorkerInfo:
    """Describe a worker as its lease would."""
    return WorkerInfo(
        worker=name,
        slots=model.slots,
        blocks=model.blocks,
        block_size=BLOCK_TOKENS,
        step_tokens=model.step_tokens,
        epoch=1,
        fleet=fleet,
        price=price,
        context=model.context,
    )


def waiting_of(job: ReplayJob, *, arrived_s: float | None = None, deadline_s: float = float("inf")) -> Waiting:
    """Describe a request as a router reads it from its envelope, without the length of its answer.

    It arrives when the trace says so, unless `arrived_s` is given; `deadline_s` counts from then.
    """
    request = job.request
    arrived_s = request.at_s if arrived_s is None else arrived_s
    return Waiting(
        id=str(job.index),
        key=job.index,
        tokens=request.tokens,
        chain=request.chain,
        block_size=BLOCK_TOKENS,
        request_class=request.request_class,
        tenant=request.tenant,
        ttft_target_s=request.ttft_target_s,
        arrived_s=arrived_s,
        deadline_s=arrived_s + deadline_s,
    )


def job_event(kind: EventKind, job: ReplayJob, worker: str) -> JobEvent:
    """Make a job event. `settled` has the tokens of the answer, the others those of the prompt."""
    request = job.request
    tokens = request.output if kind == "settled" else request.tokens
    return JobEvent(kind, str(job.index), 1, worker, tokens=tokens, uncached=job.uncached, blocks=len(request.chain))


def placed_event(placement: Placement, by: str) -> JobEvent:
    """Make the event by which other routers learn of a placement."""
    request = placement.request
    return JobEvent(
        "placed",
        request.id,
        request.attempt,
        placement.worker,
        tokens=request.tokens,
        uncached=placement.uncached,
        blocks=len(request.chain),
        by=by,
        hashes=pack_u64(placement.new_blocks[:MOST_HASHES]),
    )


def load_report(engine: ModelledEngine, worker: str, *, n: int, now_s: float) -> LoadReport:
    """Report the load of an engine as its worker would."""
    return LoadReport(
        worker=worker,
        epoch=1,
        n=n,
        at=now_s,
        slots=engine.model.slots,
        running=engine.running + engine.waiting,  # all it has, as a worker counts
        waiting=engine.waiting,
        # The engine model has no limit of KV memory, so it reports no blocks.
        queued_prefill_tokens=engine.prompt_tokens_left(now_s),
        step_s=engine.step_s,
        step_prefill_tokens=engine.step_prefill_tokens,
        step_decodes=engine.step_decodes,
    )


def apply_changes(view: CacheView, worker: str, *, stored: Sequence[int], removed: Sequence[int], now_s: float) -> None:
    """Apply the cache changes of one step."""
    view.apply(
        worker,
        removed={"device": removed} if removed else {},
        stored={"device": stored} if stored else {},
        now_s=now_s,
    )


def job_index(request: Waiting) -> int:
    """Return the place of the request in its trace."""
    return int(request.id)
