"""Reports the progress of `headrace up` while it starts, and prints its one ready line."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence

import structlog

from headrace.up.frontend_probe import base_url, kinds_of, served_models
from headrace.up.output.ready_text import ready_text
from headrace.up.output.terminal import Terminal

_log = structlog.get_logger()

_POLL_S = 0.05
_LOG_PROGRESS_EVERY_S = 10.0


async def until_answering(
    terminal: Terminal, host: str, ports: Sequence[int], *, tls: bool, waiting_for: Callable[[], str], began_s: float
) -> list[str]:
    """Show progress until the frontends at all `ports` say that some model can answer, and return the names of those that can.

    `began_s` is a time of the monotonic clock.
    """
    next_status_s = began_s + terminal.QUIET_START_S
    next_log_s = began_s + _LOG_PROGRESS_EVERY_S
    while True:
        served = [await served_models(host, port, tls=tls) for port in ports]
        if all(served):
            return served[0]
        now_s = time.monotonic()
        elapsed_s = now_s - began_s
        if now_s >= next_status_s:
            next_status_s = now_s + terminal.STATUS_EVERY_S
            terminal.waiting(waiting_for(), elapsed_s)
        if now_s >= next_log_s:
            next_log_s = now_s + _LOG_PROGRESS_EVERY_S
            _log.info("up.waiting", waiting_for=waiting_for(), elapsed_s=round(elapsed_s))
        await asyncio.sleep(_POLL_S)


async def say_ready(host: str, port: int, *, tls: bool, models: Sequence[str], after_s: float, console: str = "") -> None:
    """Print the ready line with commands to try. `models` can answer; `after_s` is the time that the start took.

    `console` is the link to the console, which holds its key and is printed only, never logged.
    """
    url = base_url(host, port, tls=tls)
    _log.info("up.ready", url=url, models=models, elapsed_s=round(after_s, 2))
    model = models[0]
    kinds = await kinds_of(host, port, model, tls=tls)
    sys.stdout.write(ready_text(url, model, after_s=after_s, kinds=kinds, console=console))
    sys.stdout.flush()
