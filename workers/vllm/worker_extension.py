"""Extends vLLM's worker processes with calls that end a hand-over early, where vLLM itself only waits for time to pass.

vLLM frees the blocks of a finished prefill when the decode side says so or the lease ends, and has no call to do it before.
A decode request of the push connector that was aborted keeps its blocks until the prefill side has written them, for ever if
that does not happen.  This class reaches into the NIXL connector (vLLM 0.32) for both.  vLLM mixes it into its worker class
(`worker_extension_cls`), and its methods are called on all ranks with `collective_rpc`, between two steps.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from headrace.workers.kit import pace_nixl
from headrace.workers.vllm.transfer_connector import base_id, sequence_of


def _pace_on_cpu() -> None:
    """Pace NIXL if the engine computes on the CPU, where NIXL must not use up a core."""
    if "vllm" in sys.modules:  # not in a test of this module alone
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            pace_nixl()


_pace_on_cpu()  # vLLM imports this module in its worker processes, before they make their NIXL agents


class HandoverExtension:
    """Mixed into vLLM's worker class. Method names must not collide with that class's."""

    def headrace_let_go(self, sequence_ids: list[str]) -> list[str]:
        """End the leases of the blocks computed for these sequences, on the prefill side.

        Returns the sequences that are about to get a lease: vLLM notifies its workers of the end of a request a step later.
        """
        worker = _connector_worker()
        coming = []
        for request in list(worker._reqs_to_process):
            if (sequence_id := sequence_of(request)) not in sequence_ids:
                continue
            if request in worker._reqs_to_send:
                worker._reqs_to_send[request] = time.perf_counter()
            else:
                coming.append(sequence_id)
        return coming

    def headrace_receiving(self, request_ids: list[str]) -> list[tuple[str, bool]]:
        """Return which of these requests wait for blocks of another engine, and whether that is still reachable (decode side).

        The check sends vLLM's lease renewal, so it must not be made for aborted requests, whose lease must end.
        """
        worker = _connector_worker()
        found = []
        for request, meta in list(worker._recving_metadata.items()):
            if base_id(request) not in request_ids or not any(meta.local_block_ids):
                continue
            reachable = True
            try:
                for agent in dict(worker._remote_agents.get(meta.remote.engine_id) or {}).values():
                    worker.nixl_wrapper.send_notif(agent, notif_msg=f"HB:{meta.remote.request_id}".encode())
            except Exception:
                reachable = False
            found.append((base_id(request), reachable))
        return found

    def headrace_give_up(self, request_ids: list[str]) -> int:
        """Treat these transfers as failed, on the decode side. Only when no engine can write into their blocks any more."""
        worker = _connector_worker()
        given_up = 0
        for request, meta in list(worker._recving_metadata.items()):
            if base_id(request) in request_ids and any(meta.local_block_ids):
                worker._failed_recv_reqs.put(request)
                given_up += 1
        return given_up

    def headrace_decline_unstarted(self, request_ids: list[str]) -> int:
        """Notify the prefill side of requests that were aborted before they had blocks, on the decode side.

        vLLM means to, but its push connector only makes a note of it, which is removed here. The scheduler has forgotten such a
        request and must never hear of it again.
        """
        worker = _connector_worker()
        declined = 0
        for request, meta in list(worker._recving_metadata.items()):
            if base_id(request) in request_ids and not any(meta.local_block_ids):
                del worker._recving_metadata[request]
                remote = meta.remote
                self._headrace_tell(remote.engine_id, remote.request_id, remote.host, remote.port, meta.tp_size, meta.pp_size)
                declined += 1
        return declined

    def headrace_decline(self, declined: list[Mapping[str, Any]]) -> None:
        """Notify the prefill sides of these parameters that the blocks will not be fetched, on the decode side."""
        for params in declined:
            self._headrace_tell(
                params["remote_engine_id"],
                params["remote_request_id"],
                params["remote_host"],
                params["remote_port"],
                params["tp_size"],
                params.get("pp_size", 1),
            )

    def _headrace_tell(self, engine: str, request: str, host: str, port: int, tp_size: int, pp_size: int) -> None:
        """Send vLLM's message that the blocks were fetched."""
        worker = _connector_worker()
        message = f"{request}:1".encode()

        def tell(_: Any = None) -> None:
            for agent in dict(worker._remote_agents.get(engine) or {}).values():
                worker.nixl_wrapper.send_notif(agent, notif_msg=message)

        shaking_hands = worker._ensure_handshake(engine, host, port, tp_size, pp_size=pp_size)
        if shaking_hands is None:
            with suppress(Exception):  # a peer that is gone holds no blocks
                tell()
        else:  # in the thread that shakes hands; a failure there reaches no caller, and vLLM logs it
            shaking_hands.add_done_callback(tell)


def _connector_worker() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    group: Any = get_kv_transfer_group()
    candidates = [group, *getattr(group, "_connectors", ())]  # a MultiConnector has several inside
    return next(one.connector_worker for one in candidates if getattr(one, "connector_worker", None) is not None)
