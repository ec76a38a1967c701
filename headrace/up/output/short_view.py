"""Chooses the few lines that a person sees of a deployment's start, its crashes and its stop, from the log events of all parts.

Nothing is written here: an event goes in, a line or nothing comes out.

    ✓ nats-server  nats://127.0.0.1:40123                  0.1 s
    ✓ frontend     http://127.0.0.1:8000                   0.6 s
    ⠸ worker       waiting for the engine (vllm) to load   9.3 s
    ✓ worker-1     vllm serves smollm2-135m-instruct      16.2 s
    ✗ worker-1     killed by SIGKILL, starts again in 0.5 s
    ✓ worker-1     is back after 1.9 s
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_ASCII_SPINNER = "|/-\\"
_NAME_WIDTH = 12  # in characters
_TEXT_WIDTH = 48  # of what stands before the time
_COLOURS = {"good": 32, "bad": 31, "note": 2}
_MARKS = {"good": "✓", "bad": "✗", "note": "·"}
_ASCII_MARKS = {"good": "+", "bad": "x", "note": "-"}
_NATS = "nats-server"


class Style(NamedTuple):
    """Abilities of a terminal."""

    colour: bool = False
    unicode: bool = True


class ShortView:
    """The view of one run of `headrace up`. `clock` gives seconds, of which the first call is the start."""

    def __init__(self, *, style: Style, clock: Callable[[], float] = time.monotonic) -> None:
        self._style = style
        self._clock = clock
        self._began_s = clock()
        self._crashed_s: dict[str, float] = {}
        self._announced = False
        self._stopping = False
        self._run_file_told = False  # it is tried again and again
        self._step = ""  # of preparing the model
        self._serving: set[str] = set()  # workers that can answer
        self.ready: set[str] = set()
        """Names of the parts that can do their work."""
        self._events: dict[str, Callable[[str, Mapping[str, Any]], str | None]] = {
            "server.started": lambda _part, event: self._is_ready(_NATS, str(event.get("url", ""))),
            "frontend.listening": lambda part, event: self._is_ready(part, str(event.get("url", ""))),
            "worker.ready": self._worker_is_ready,
            "router.ready": lambda part, _event: self._is_ready(part, "places requests", timed=False),
            "model.preparing": self._preparing,
            "model.prepared": self._prepared,
            "model.downloading": self._downloading,
            "part.crashed": self._crashed,
            "part.start_failed": lambda _part, event: self._line("bad", _told(event), f"does not start: {event.get('error')}"),
            "part.left": self._left,
            "settings.unknown": self._unknown,
            "up.no_workers": self._no_workers,
            "up.ready": self._is_announced,
            "up.stopping": self._stops,
            "up.killing": lambda _part, _event: "Killing everything.",
            "up.stopped": lambda _part, _event: "Stopped.",
            "up.run_file_not_written": self._run_file,
            "nats.restarting": self._restarting,
        }

    def line(self, part: str, logged: str) -> str | None:
        """Return the line to show for a log line of a part, or of `up` itself; None for one that is not shown."""
        if not logged.startswith("{") or not any(f'"{name}"' in logged for name in self._events):
            return None
        try:
            event = json.loads(logged)
        except ValueError:
            return None
        take = self._events.get(str(event.get("event")))
        return take(part, event) if take is not None else None

    def waiting(self, what: str) -> str:
        """Return the live line under all others while the deployment starts."""
        elapsed_s = self._clock() - self._began_s
        frames = SPINNER if self._style.unicode else _ASCII_SPINNER
        frame = frames[int(elapsed_s * 10) % len(frames)]
        if self._step:
            name, text = "model", self._step
        elif self._serving & self.ready:
            name, text = "frontend", "waiting until it knows the workers"
        else:
            name, text = "worker", what
        return f"  {frame} {name:<{_NAME_WIDTH}} {text:<{_TEXT_WIDTH}} {elapsed_s:6.1f} s"

    def _is_ready(self, part: str, text: str, *, timed: bool = True) -> str | None:
        self.ready.add(part)
        crashed_s = self._crashed_s.pop(part, None)
        if self._stopping:
            return None
        if crashed_s is not None:
            return self._line("good", part, f"is back after {self._clock() - crashed_s:.1f} s")
        if self._announced:
            return None
        return self._line("good", part, text, after_s=self._clock() - self._began_s if timed else None)

    def _worker_is_ready(self, part: str, event: Mapping[str, Any]) -> str | None:
        if not part.startswith(("prefill-", "encode-")):
            self._serving.add(part)
        return self._is_ready(part, f"{event.get('engine')} serves {event.get('model')}")

    def _is_announced(self, _part: str, _event: Mapping[str, Any]) -> None:
        self._announced = True

    def _preparing(self, _part: str, event: Mapping[str, Any]) -> None:
        self._step = str(event.get("step", "")).rstrip(" …")

    def _downloading(self, _part: str, event: Mapping[str, Any]) -> None:
        self._step = "" if event.get("done") else f"downloading {event.get('model')}, {event.get('arrived_mb')} MB so far"

    def _prepared(self, part: str, event: Mapping[str, Any]) -> str:
        self._step = ""
        return self._line("good", part, str(event.get("name", "")), after_s=self._clock() - self._began_s)

    def _crashed(self, _part: str, event: Mapping[str, Any]) -> str:
        part = _told(event)
        self.ready.discard(part)
        self._crashed_s.setdefault(part, self._clock())
        error = f": {event['error']}" if event.get("error") else ""
        return self._line(
            "bad", part, f"{_ending(event.get('exit_code'))}, starts again in {event.get('restart_in_s', 0):g} s{error}"
        )

    def _restarting(self, _part: str, event: Mapping[str, Any]) -> str:
        self._crashed_s.setdefault(_NATS, self._clock())
        return self._line("bad", _NATS, f"starts again: {event.get('reason')}")

    def _run_file(self, _part: str, event: Mapping[str, Any]) -> str | None:
        if self._run_file_told:
            return None
        self._run_file_told = True
        return self._line("bad", "run file", f"cannot be written: {event.get('error')}")

    def _left(self, _part: str, event: Mapping[str, Any]) -> str | None:
        self.ready.discard(_told(event))
        match event.get("reason"):
            case "drained":
                return self._line("note", _told(event), "is drained and has left")
            case "configuration" if not event.get("fatal"):  # else `up` ends with the error
                return self._line("bad", _told(event), f"cannot start: {event.get('error')}")
            case _:
                return None

    def _unknown(self, part: str, event: Mapping[str, Any]) -> str | None:
        return self._line("bad", "settings", str(event.get("detail"))) if part == "up" else None

    def _no_workers(self, _part: str, event: Mapping[str, Any]) -> str:
        return self._line("note", "no worker", f"is started here. To add one: {event.get('join')}")

    def _stops(self, _part: str, event: Mapping[str, Any]) -> str | None:
        self._stopping = True
        if event.get("failed"):
            return None  # the reason follows
        return f"\nStopping: running answers may end, for {event.get('grace_s', 0):g} s at most. Ctrl-C again kills everything."

    def _line(self, kind: str, part: str, text: str, *, after_s: float | None = None) -> str:
        mark = (_MARKS if self._style.unicode else _ASCII_MARKS)[kind]
        if self._style.colour:
            mark = f"\x1b[{_COLOURS[kind]}m{mark}\x1b[0m"
        timed = f"{text:<{_TEXT_WIDTH}} {after_s:6.1f} s" if after_s is not None else text
        return f"  {mark} {part:<{_NAME_WIDTH}} {timed}"


def _told(event: Mapping[str, Any]) -> str:
    """Return the name of the part that an event is about."""
    name = str(event.get("part", "?"))
    return _NATS if name == "nats" else name


def _ending(exit_code: Any) -> str:
    if not isinstance(exit_code, int):
        return "has ended"
    if exit_code >= 0:
        return f"ended with code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"
