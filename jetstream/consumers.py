"""The consumers of a deployment, as data: who reads what is queued."""

from __future__ import annotations

from jetstream.ports import ConsumerSpec
from jetstream.subjects import RequestClass, Subjects
from jetstream.topology import request_stream

REQ_ACK_WAIT_S = 3.0
WORK_INACTIVE_S = 15 * 60.0


def request_consumer(subjects: Subjects, pool: str, request_class: RequestClass) -> ConsumerSpec:
    """Shared by all routers (priority 0) and, without a router, workers (priority 9) of a pool."""
    return ConsumerSpec(
        stream=request_stream(subjects, request_class),
        name=subjects.req_consumer(pool, request_class),
        filter_subjects=(subjects.req_filter(pool, request_class),),
        ack_wait_s=REQ_ACK_WAIT_S,
        max_ack_pending=65536,
        prioritized=True,
        description=f"requests of class {request_class}, pool {pool}",
    )


def work_consumer(subjects: Subjects, pool: str, worker: str) -> ConsumerSpec:
    """Read by its worker alone. Goes away by itself when that worker has been gone for long; its messages stay."""
    return ConsumerSpec(
        stream=subjects.stream("WORK"),
        name=subjects.work_consumer(worker),
        filter_subjects=(subjects.work(pool, worker),),
        ack_wait_s=REQ_ACK_WAIT_S,
        max_ack_pending=65536,
        inactive_threshold_s=WORK_INACTIVE_S,
        description=f"work of {worker}",
    )


def prefill_consumer(subjects: Subjects, pool: str, worker: str | None = None) -> ConsumerSpec:
    """Shared by the prefill workers of a pool, or one worker's own, which goes away when that worker has been gone for long."""
    return ConsumerSpec(
        stream=subjects.stream("PREFILL"),
        name=subjects.prefill_consumer(pool, worker),
        filter_subjects=(subjects.prefill(pool, worker),),
        ack_wait_s=REQ_ACK_WAIT_S,
        max_ack_pending=65536,
        inactive_threshold_s=None if worker is None else WORK_INACTIVE_S,
        description=f"prefill jobs of pool {pool}" if worker is None else f"prefill jobs for {worker}",
    )
