"""Compares what a message to an ingress says with the worker that its subject names, and which the server has checked.

Where workers log in, they may publish only to subjects that have their pool and, with a login of their own, their id.  So a
frame or a claim counts only for requests of that pool and in the name of that worker.
"""

from __future__ import annotations

from headrace.broker.messages import Check, Claim, Frame, IngressControl, Refuse, SuspicionQuery
from headrace.broker.protocol.judge import Judge
from headrace.jetstream.subjects import WorkerSubject


def forged_frame(judge: Judge, sender: WorkerSubject, frame: Frame) -> str:
    """Return why a frame of this sender counts for nothing, an empty text if it counts."""
    if frame.worker != sender.worker:
        return f"it is sent by {sender.worker} in the name of {frame.worker}"
    return _of_another_pool(judge, sender, {row.id for row in frame.rows})


def forged_control(judge: Judge, sender: WorkerSubject, control: IngressControl) -> str:
    """Return why a question of this sender is not answered, an empty text if it is."""
    if isinstance(control, Claim | Check) and control.worker != sender.worker:
        return f"it is sent by {sender.worker} in the name of {control.worker}"
    if isinstance(control, Check):
        return _of_another_pool(judge, sender, {run.id for run in control.runs})
    if isinstance(control, Claim | SuspicionQuery | Refuse):
        return _of_another_pool(judge, sender, {control.id})
    return "a worker may not say that"


def _of_another_pool(judge: Judge, sender: WorkerSubject, ids: set[str]) -> str:
    for request_id in ids:
        record = judge.get(request_id)
        if record is not None and record.pool != sender.pool:
            return f"a worker of pool {sender.pool} speaks of a request of pool {record.pool}"
    return ""
