"""Makes the placement of a request on a worker: what it computes there itself, and when its first token may be expected."""

from __future__ import annotations

from headrace.router.index.types import NO_OVERLAP, CacheView, Overlap
from headrace.router.placement.disagg.prefill_costs import local_decision
from headrace.router.placement.disagg_planner import DisaggPlan
from headrace.router.placement.load import WorkerLoad
from headrace.router.placement.types import Placement, Waiting
from headrace.router.placement.worker_view import WorkerView


def uncached_tokens(request: Waiting, overlap: Overlap) -> int:
    """Return the prompt tokens that have to be computed; the last one always has to."""
    return max(request.tokens - overlap.blocks * request.block_size, 1)


def verified_overlap(view: CacheView, load: WorkerLoad, request: Waiting) -> Overlap:
    """Return what the worker's cache has of a request's prompt, with every block compared."""
    chain = request.chain
    return load.info.whole(view.verify(load.info.worker, chain)) if len(chain) else NO_OVERLAP


def local_plan(
    request: Waiting, load: WorkerLoad, overlap: Overlap, workers: WorkerView, wait_s: float, *, decision: str = ""
) -> DisaggPlan:
    """Plan that the worker computes the prompt itself. `decision`: the reason to say, in a pool with prefill workers."""
    service_s = uncached_tokens(request, overlap) * workers.all_token_s[load.column] + workers.all_step_s[load.column]
    return DisaggPlan(local_decision(decision) if decision else None, wait_s, service_s)


def make_placement(
    request: Waiting, load: WorkerLoad, overlap: Overlap, plan: DisaggPlan, reason: str, now_s: float, *, kept: bool = False
) -> Placement:
    """Make the placement of a request on a worker, by this plan. `kept`: the worker may not preempt it."""
    return Placement(
        request=request,
        worker=load.info.worker,
        uncached=uncached_tokens(request, overlap),
        new_blocks=request.chain[overlap.device :],
        predicted_ttft_s=request.age_s(now_s) + plan.wait_s + plan.service_s,
        waited_s=request.waited_s(now_s),
        reason=reason,
        prefill=plan.decision,
        kept=kept,
    )
