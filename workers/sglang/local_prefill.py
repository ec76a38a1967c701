"""Lets an SGLang engine in the role `decode` compute prompts by itself, for requests that no prefill worker computes.

SGLang starts an engine for one role and then refuses, in the role `decode`, every request without a rendezvous. A worker needs
both: short prompts, and prompts whose prefill worker is gone. These hooks keep such requests in a queue of their own; while it
has any, the scheduler takes the step that it would take in an aggregated engine, for that queue. Requests whose blocks have
arrived come first. SGLang calls the hooks in its scheduler process (`sglang.srt.plugins`), on any device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.workers.sglang.cpu_plugin.hook import Hook

LOCAL_HOST = "headrace-local"
"""The bootstrap host of a request whose prompt this engine computes."""

_QUEUE = "headrace_local_prompts"
_DECODE = "sglang.srt.disaggregation.decode"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


def prompts_of(scheduler: Any) -> list[Any]:
    """Return the requests whose prompts wait to be computed here."""
    queue: list[Any] | None = getattr(scheduler, _QUEUE, None)
    if queue is None:
        queue = []
        setattr(scheduler, _QUEUE, queue)
    return queue


def add(original: Callable[..., None], queue: Any, req: Any, is_retracted: bool = False, **kwargs: Any) -> None:
    """Queue a request for its own prefill, if it has no rendezvous. A retracted one has its blocks already."""
    from sglang.srt.disaggregation.utils import is_unadmitted_reject

    if req.bootstrap_host != LOCAL_HOST or is_retracted or is_unadmitted_reject(req):
        original(queue, req, is_retracted=is_retracted, **kwargs)
    elif not queue._check_if_req_exceed_kv_capacity(req):  # it refuses such a request itself
        prompts_of(queue.scheduler).append(req)
        req.time_stats.set_wait_queue_entry_time()
        req.arrival_processed_tokens = queue.scheduler.processed_tokens_counter


def next_batch(original: Callable[..., Any], scheduler: Any, running_batch: Any) -> Any:
    """Choose the next step: an aggregated one for the local prompts, where SGLang's own for arrived blocks may wait."""
    prompts, last = prompts_of(scheduler), scheduler.last_batch
    computing = scheduler.chunked_req is not None or (last is not None and last.forward_mode.is_extend())
    if not computing and (not prompts or scheduler.waiting_queue):
        return original(scheduler, running_batch=running_batch)
    arrived, scheduler.waiting_queue = scheduler.waiting_queue, prompts
    try:
        return scheduler.get_next_batch_to_run(running_batch=running_batch, last_batch=last)
    finally:
        setattr(scheduler, _QUEUE, scheduler.waiting_queue)
        scheduler.waiting_queue = arrived


def abort(original: Callable[..., None], scheduler: Any, message: Any) -> None:
    """Abort queued local prompts; SGLang aborts what runs."""
    from sglang.srt.managers.scheduler import _make_abort_req

    kept = []
    for req in prompts_of(scheduler):
        if message.abort_all or req.rid.startswith(message.rid):
            scheduler._release_aborted_request(req)
            scheduler.send_abort_output(_make_abort_req(req, finished_reason=message.finished_reason), req)
        else:
            kept.append(req)
    prompts_of(scheduler)[:] = kept
    original(scheduler, message)


def is_idle(original: Callable[..., bool], scheduler: Any, *args: Any, **kwargs: Any) -> bool:
    """Return whether the scheduler has nothing to do, local prompts included."""
    return original(scheduler, *args, **kwargs) and not prompts_of(scheduler)


HOOKS = (
    Hook(f"{_DECODE}.DecodePreallocQueue.add", add, "around"),
    Hook(f"{_DECODE}.SchedulerDisaggregationDecodeMixin.get_next_disagg_decode_batch_to_run", next_batch, "around"),
    Hook(f"{_SCHEDULER}.abort_request", abort, "around"),
    Hook(f"{_SCHEDULER}.is_fully_idle", is_idle, "around"),
)
