"""Tells whether an address can be reached from other machines, and refuses to listen there unprotected."""

from __future__ import annotations

import ipaddress

from headrace.frontend.settings import FrontendSettings

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


def is_loopback(host: str) -> bool:
    """Return True if only processes of this machine reach what listens on this address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def exposure_problem(settings: FrontendSettings) -> str | None:
    """Return why a frontend must not start with these settings, as one sentence that says what to do; None if it may."""
    if is_loopback(settings.host) or settings.insecure or settings.asks_for_keys:
        return None
    return (
        f"{settings.host} can be reached from other machines: give --api-key (or HEADRACE_API_KEY), or --auth keys and make "
        "keys with `headrace keys create`, or --insecure to serve all who reach it"
    )
