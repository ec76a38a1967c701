"""Runs `headrace worker health`, `sleep`, `wake`, `pause`, `resume`, `reset-cache`, `profile` and `log-level`."""

from __future__ import annotations

import json
import sys
from typing import Any

from headrace.base.errors import EXIT_FAILURE, EXIT_OK, CommandError, StartFailed
from headrace.broker.codec import decode, encode
from headrace.broker.messages import (
    CheckHealth,
    Operated,
    Pause,
    Profile,
    ResetCache,
    Resume,
    SetLogLevel,
    Sleep,
    Wake,
    WorkerCommand,
)
from headrace.commands.operating.control import check_grace, find_worker, how_far, live_workers
from headrace.commands.operating.control_client import connected
from headrace.commands.waiting import told_while
from headrace.config.settings import Settings
from headrace.jetstream.errors import NoResponder, RequestTimeout
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects

_MARGIN_S = 15.0  # for what the grace period leaves over, and for the way there and back
_ENGINE_S = 150.0  # what an engine may take for an operation, and a little
_LOAD_S = 1000.0  # waking, where weights are read again and the engine is warmed up
_PATIENCE_S: dict[type[WorkerCommand], float] = {Wake: _LOAD_S, SetLogLevel: _MARGIN_S}


def show_health(settings: Settings, worker: str, *, canary: bool, timeout_s: float, as_json: bool) -> int:
    """Run `headrace worker health`. The exit code is 1 for a worker that is not healthy."""
    if not 0 < timeout_s < float("inf"):
        raise CommandError(f"--timeout must be above 0 seconds, got {timeout_s:g}")
    command = CheckHealth(canary=canary, timeout_s=timeout_s)
    told, answer = _ask(settings, worker, command, name="health", patience_s=timeout_s + _MARGIN_S)
    if as_json:
        sys.stdout.write(json.dumps({"worker": told, "healthy": answer.ok, **answer.report}, indent=1) + "\n")
    else:
        sys.stdout.write(f"{answer.message}\n{_lines(answer.report)}")
    return EXIT_OK if answer.ok else EXIT_FAILURE


def sleep_worker(settings: Settings, worker: str, *, level: int, grace_s: float | None) -> int:
    """Run `headrace worker sleep` and return when it sleeps. Raises CommandError."""
    if grace_s is not None:
        check_grace(grace_s)
    # without a grace period it is the worker's own, which may be anything
    patience_s = _ENGINE_S + (3600.0 if grace_s is None else grace_s)
    return _tell(settings, worker, Sleep(level=level, grace_s=grace_s), name="sleep", patience_s=patience_s)


def wake_worker(settings: Settings, worker: str) -> int:
    """Run `headrace worker wake` and return when it takes requests. Raises CommandError."""
    return _tell(settings, worker, Wake(), name="wake")


def pause_worker(settings: Settings, worker: str, *, grace_s: float | None) -> int:
    """Run `headrace worker pause` and return when its engine stands still. Raises CommandError."""
    if grace_s is not None:
        check_grace(grace_s)
    return _tell(settings, worker, Pause(grace_s=grace_s), name="pause", patience_s=_ENGINE_S + (grace_s or 0.0))


def resume_worker(settings: Settings, worker: str) -> int:
    """Run `headrace worker resume`. Raises CommandError."""
    return _tell(settings, worker, Resume(), name="resume")


def reset_cache(settings: Settings, worker: str) -> int:
    """Run `headrace worker reset-cache`. Raises CommandError."""
    return _tell(settings, worker, ResetCache(), name="reset-cache")


def profile_worker(settings: Settings, worker: str, action: Any) -> int:
    """Run `headrace worker profile start` or `stop`. Raises CommandError."""
    return _tell(settings, worker, Profile(action=action), name=f"profile {action}")


def set_log_level(settings: Settings, worker: str, level: str) -> int:
    """Run `headrace worker log-level`. Raises CommandError."""
    return _tell(settings, worker, SetLogLevel(level=level), name="log-level")


def _tell(settings: Settings, worker: str, command: WorkerCommand, *, name: str, patience_s: float | None = None) -> int:
    """Have a worker do this, and print what it says. Raises CommandError with its reason when it refuses."""
    patience_s = patience_s if patience_s is not None else _PATIENCE_S.get(type(command), _ENGINE_S)
    told, answer = _ask(settings, worker, command, name=name, patience_s=patience_s)
    if not answer.ok:
        raise CommandError(f"worker {told} refused: {answer.message}")
    sys.stdout.write(f"{answer.message}\n{_lines(answer.report)}")
    return EXIT_OK


def _ask(settings: Settings, wanted: str, command: WorkerCommand, *, name: str, patience_s: float) -> tuple[str, Operated]:
    """Send a command to a worker and return the worker's id and answer. Raises CommandError when there is none."""

    async def ask(messaging: Messaging, names: Subjects) -> tuple[str, Operated]:
        member = find_worker(wanted, await live_workers(messaging, names))
        subject = names.operate_worker(member.pool, member.worker)
        try:
            asked = messaging.request(subject, encode(command), timeout_s=patience_s)
            what = f"worker {member.worker}: {name}"
            answer = await told_while(asked, what, lambda: how_far(messaging, names, member.worker))
        except NoResponder:
            raise StartFailed(
                f"worker {member.worker} does not answer: it has just left, cannot reach the NATS server, or is of a "
                "version without this command"
            ) from None
        except RequestTimeout:
            raise StartFailed(
                f"worker {member.worker} has not answered within {patience_s:g} s; what became of it: headrace worker status"
            ) from None
        return member.worker, decode(Operated, answer)

    return connected(settings, ask, name=f"headrace worker {name}")


def _lines(report: dict[str, Any]) -> str:
    """Return what was found or measured, a line each."""
    shown = {name: json.dumps(value) if isinstance(value, dict | list) else value for name, value in report.items()}
    width = max(map(len, shown), default=0)
    return "".join(f"  {name.ljust(width)}  {_readable(name, value)}\n" for name, value in shown.items())


def _readable(name: str, value: Any) -> str:
    if "bytes" in name and isinstance(value, int):
        return f"{value / 2**20:,.1f} MiB"
    if name.endswith("_s"):
        return f"{value:g} s"
    return str(value)
