"""Sets up SGLang's side of hand-overs: a rendezvous of two engines in a room, over NIXL.

The decode side asks the prefill side's bootstrap server, whose address the prefill worker gives it, where to send the numbers
of its pages; the prefill side writes into them. An engine is started for one role. A prompt without a rendezvous is computed by
a decode engine itself (`local_prefill`), and by a prefill engine for no other engine: a warm-up or a probe.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any

from headrace.workers.engine import DisaggStyle, EngineConfig, Fault, Handover, Output, Role, Sequence
from headrace.workers.errors import EngineStartFailed, RequestInvalid
from headrace.workers.kit import reserve_port
from headrace.workers.sglang.cpu_plugin import Hook

# Lets an SGLang engine in the role `decode` compute prompts by itself, for requests that no prefill worker computes.
#
# SGLang starts an engine for one role and then refuses, in the role `decode`, every request without a rendezvous. A worker
# needs both: short prompts, and prompts whose prefill worker is gone. These hooks keep such requests in a queue of their own;
# while it has any, the scheduler takes the step that it would take in an aggregated engine, for that queue. Requests whose
# blocks have arrived come first. SGLang calls the hooks in its scheduler process (`sglang.srt.plugins`), on any device.

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


# Lets the processes of one SGLang meet in memory of their own.
#
# Left alone they meet at PyTorch's store over TCP, which listens on every address of the machine and asks for no login.

METHOD = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
"""SGLang's variable for the place where its processes meet."""


def use_local_store(args: Mapping[str, Any], environ: MutableMapping[str, str]) -> None:
    """Name a file in memory as the place, by this process, whose end is the file's.

    Not where SGLang runs on several machines or as several replicas, and not where the operator has named a place.
    """
    apart = int(args.get("nnodes") or 1) > 1 or int(args.get("dp_size") or 1) > 1
    if apart or args.get("dist_init_addr") or METHOD in environ:
        return
    environ[METHOD] = f"file:///proc/{os.getpid()}/fd/{os.memfd_create('headrace-sglang')}"


HOST = "SGLANG_HOST_IP"
"""The variable with the address at which other workers reach this engine, for SGLang's sockets as for its bootstrap server."""
LOOPBACK = "127.0.0.1"
PORT_ARG = "disaggregation_bootstrap_port"
BACKEND_ARG = "disaggregation_transfer_backend"
BACKEND = "nixl"

_NO_PEER = "2.2.2.2"  # SGLang's own word for a bootstrap host that does not exist: the pages go nowhere
_ROLES = frozenset({Role.PREFILL, Role.DECODE})


def hands_over(role: Role) -> bool:
    return role in _ROLES


def role_of(mode: str | None) -> Role:
    return Role(mode) if mode in {role.value for role in _ROLES} else Role.AGGREGATED


def reachable_host(host: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return the address at which others reach a server that listens on `host`, which may be every address."""
    return environ.get(HOST, LOOPBACK) if host in ("", "0.0.0.0", "::") else host  # a comparison


@contextmanager
def rendezvous_args(config: EngineConfig, environ: MutableMapping[str, str] = os.environ) -> Iterator[dict[str, Any]]:
    """Yield SGLang's settings for the role, and keep the bootstrap server's port free while SGLang starts.

    Sets `SGLANG_HOST_IP` to the address at which other engines reach this one, unless it is set. Raises EngineStartFailed.
    """
    if not hands_over(config.role):
        if config.role is not Role.AGGREGATED:
            raise EngineStartFailed(f"the SGLang adapter does not serve the role {config.role.value!r}")
        yield {}
        return
    host = environ.setdefault(HOST, config.peer_host)
    args: dict[str, Any] = {"disaggregation_mode": config.role.value, BACKEND_ARG: BACKEND, "host": host}
    if config.role is Role.DECODE:
        args["disaggregation_decode_enable_radix_cache"] = True  # without it a decode engine caches no prefixes
        yield args
        return
    wanted = int(config.args.get(PORT_ARG) or 0)
    with ExitStack() as reserved:
        try:
            args[PORT_ARG] = reserve_port(reserved, host, wanted)
        except (OSError, OverflowError) as error:
            raise EngineStartFailed(f"{PORT_ARG}={wanted} on {host}: {error}; {HOST} is an address of this machine") from error
        yield args


def handover_word(version: str, *, backend: str, dtype: str, page_size: int, model: tuple[Any, ...]) -> str:
    """Return a word that is equal for engines that can hand over to each other. `model` describes its KV cache."""
    digest = hashlib.sha256(repr(model).encode()).hexdigest()[:8]
    return f"sglang/{backend}/{version}/{dtype}/{page_size}/{digest}"


def bootstrap_address(role: Role, host: str, port: int) -> str:
    """Return the address of the bootstrap server, which only a prefill engine has."""
    if role is not Role.PREFILL:
        return ""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def with_handovers(role: Role) -> dict[str, Any]:
    """Return the fields of `Capabilities` that differ for an engine in this role."""
    if not hands_over(role):
        return {}
    return {"roles": frozenset({role}), "disagg": DisaggStyle.RENDEZVOUS}


def bootstrap_fields(handover: Handover | None, *, role: Role, address: str) -> dict[str, Any]:
    """Return the fields of a request that name its rendezvous. Raises RequestInvalid.

    `role` and `address` are those of this engine.
    """
    if not hands_over(role):
        if handover is not None:
            raise RequestInvalid("this SGLang was started aggregated and takes no hand-overs", param="handover")
        return {}
    if handover is None:
        return {"bootstrap_host": LOCAL_HOST if role is Role.DECODE else _NO_PEER, "bootstrap_room": 1}
    if handover.kind != role.value:
        raise RequestInvalid(f"an SGLang in the role {role.value} takes no {handover.kind} hand-overs", param="handover")
    if not handover.room:  # SGLang takes room 0 for a memory slot that was never written
        raise RequestInvalid(f"a rendezvous needs a room, not {handover.room!r}", param="handover")
    host, port = split_address(address if role is Role.PREFILL else handover.peer or "")
    return {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": handover.room}


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of a bootstrap server's address. Raises RequestInvalid."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise RequestInvalid(f"the address of a prefill worker's engine is host:port, not {address!r}", param="handover")
    return host, int(port)


def as_transfer_failed(sequence: Sequence, output: Output, *, first: bool) -> Output:
    """Rename the fault of a sequence that waited for blocks of another engine: its prompt can be computed here."""
    if first and output.fault is not None and sequence.handover is not None and sequence.handover.kind == "decode":
        output.fault = Fault("transfer_failed", output.fault.message, retriable=True)
    return output
