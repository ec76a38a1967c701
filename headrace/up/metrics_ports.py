"""Assigns metrics ports to the parts of `headrace up`: the run file names them, and a part that is restarted keeps its own."""

from __future__ import annotations

from headrace.up.frontend_probe import choose_port


def assign_ports(first: int | None, count: int, taken: set[int], *, host: str = "127.0.0.1") -> list[int | None]:
    """Return a port for each of `count` parts, counting up from `first`; for 0 free ones outside `taken`; None for None.

    Ports are free on `host`. What is returned is added to `taken`. Raises SettingsError when no port is free.
    """
    ports: list[int | None] = []
    for number in range(count):
        port = first + number if first else first
        while port == 0:
            found = choose_port(host, 0)
            port = 0 if found in taken else found
        if port is not None:
            taken.add(port)
        ports.append(port)
    return ports
