"""Assigns to the parts of `headrace up` their ports for probes and metrics, which they keep when they are restarted."""

from __future__ import annotations

from headrace.up.frontend_probe import choose_port


def assign_ports(first: int | None, count: int, taken: set[int], *, host: str = "127.0.0.1") -> list[int]:
    """Return a port for each of `count` parts, counting up from `first`; free ones outside `taken` for 0 or None.

    Ports are free on `host`. What is returned is added to `taken`. Raises SettingsError when no port is free.
    """
    ports: list[int] = []
    for number in range(count):
        port = first + number if first else 0
        while port == 0:
            found = choose_port(host, 0)
            port = 0 if found in taken else found
        taken.add(port)
        ports.append(port)
    return ports
