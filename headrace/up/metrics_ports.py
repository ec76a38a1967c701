"""Assigns metrics ports to the parts of `headrace up`: the run file names them, and a part that is restarted keeps its own."""

from __future__ import annotations

from headrace.up.frontend_probe import choose_port

_ANY = "0.0.0.0"  # where the parts serve their metrics


def assign_ports(first: int | None, count: int, taken: set[int]) -> list[int | None]:
    """Return a port for each of `count` parts, counting up from `first`; for 0 free ones outside `taken`; None for None.

    What is returned is added to `taken`. Raises SettingsError when no port is free.
    """
    ports: list[int | None] = []
    for number in range(count):
        port = first + number if first else first
        while port == 0:
            found = choose_port(_ANY, 0)
            port = 0 if found in taken else found
        if port is not None:
            taken.add(port)
        ports.append(port)
    return ports
