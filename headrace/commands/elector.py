"""Runs `headrace elector`: has a cluster of NATS servers elect at once when one of them dies."""

from __future__ import annotations

import asyncio
import contextlib
import sys

from headrace import logs
from headrace.config.build_settings import connect_options
from headrace.config.settings import Settings
from headrace.errors import EXIT_OK
from headrace.jetstream.elections.elector import Elector
from headrace.signals import stop_signals


def run_elector(settings: Settings) -> int:
    """Run until a stop signal. Raises ServerUnreachable, or AccessDenied for a login outside the system account."""
    logs.configure(log_format=settings["log.format"], level=settings["log.level"], fields={"component": "elector"})
    return asyncio.run(_run(Elector(connect_options(settings, name="headrace elector"))))


async def _run(elector: Elector) -> int:
    ready, stopping = asyncio.Event(), asyncio.Event()
    with stop_signals(stopping.set, stopping.set):
        running = asyncio.create_task(elector.run(ready))
        ends = [asyncio.create_task(event.wait()) for event in (stopping, ready)]
        try:
            await asyncio.wait({running, *ends}, return_when=asyncio.FIRST_COMPLETED)
            if ready.is_set():
                sys.stdout.write(f"watches {', '.join(elector.servers)}; Ctrl-C ends it\n")
                sys.stdout.flush()
            await asyncio.wait({running, ends[0]}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
        finally:
            for task in (running, *ends):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({running, *ends})
    return EXIT_OK
