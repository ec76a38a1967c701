"""Runs `headrace elector`: has a cluster of NATS servers elect at once when one of them dies."""

from __future__ import annotations

import asyncio
import contextlib
import sys

from headrace.broker.part_state import PartState, Standing
from headrace.commands.run import offer_probes, probe_port, run_part, start_part
from headrace.config.build_settings import connect_options
from headrace.config.settings import Settings
from headrace.jetstream.elections import ELECTOR_NAME
from headrace.jetstream.elections.elector import Elector
from headrace.signals import stop_signals


def run_elector(settings: Settings) -> int:
    """Run until a stop signal. Raises SettingsError. Ends with a code for no server, or a login outside the system account."""
    start_part(settings, {"component": "elector"})
    elector = Elector(connect_options(settings, name=ELECTOR_NAME))
    state = PartState("elector")
    host, port = settings["elector.metrics_host"], settings["elector.metrics_port"]

    async def run() -> None:
        offer_probes(host, port, state, default=probe_port(settings, "elector"))
        await _run(elector, state)

    return run_part(settings, run)


def standing(elector: Elector) -> Standing:
    """Return what an elector is doing: it is healthy while it is connected to every server that it knows the address of."""
    found, wanted = elector.servers, elector.addresses
    why = "" if len(found) == wanted else f"connected to {len(found)} of {wanted} servers"
    return Standing(
        ready=elector.ready,
        healthy=elector.ready and not why,
        why=why or ("" if elector.ready else "it has heard of no raft groups"),
        facts={"servers": found, "addresses": wanted},
    )


async def _run(elector: Elector, state: PartState) -> None:
    ready, stopping = asyncio.Event(), asyncio.Event()
    with stop_signals(stopping.set, stopping.set):
        running = asyncio.create_task(elector.run(ready))
        telling = asyncio.create_task(state.keep(lambda: standing(elector)))
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
            for task in (running, telling, *ends):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({running, telling, *ends})
