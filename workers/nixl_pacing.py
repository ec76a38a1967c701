"""Makes NIXL's progress thread pause between two polls.

NIXL's Python class starts a thread that looks for transfers without ever pausing: a whole core per engine, also while nothing
is transferred.  Beside a GPU that core is not missed.  Where the engines themselves compute on the cores it is not: one
prefill and one decode engine would leave each other nothing.  The bindings have a setting for it (`pthrDelay`), which the class
overwrites with 0; so the class is given a config object that does not take that.

Imported in the processes of vLLM's workers and SGLang's schedulers, before they make their agent.
"""

from __future__ import annotations

from typing import Any

PAUSE_US = 200
"""Microseconds that the thread sleeps between two polls, by which transfers are seen later; they take milliseconds anyway."""


def pace_nixl() -> bool:
    """Have every agent that this process creates from now on pause its progress thread. Returns False without such a NIXL."""
    try:
        from nixl import _api
    except ImportError:
        return False
    bindings: Any = getattr(_api, "nixlBind", None)
    config: Any = getattr(bindings, "nixlAgentConfig", None)
    delay: Any = getattr(config, "pthrDelay", None)
    if config is None or not hasattr(delay, "__set__"):
        return False

    class Paced(config):  # type: ignore[misc]  # known at run time only
        """A config that keeps Headrace's delay."""

        def __init__(self) -> None:
            super().__init__()
            delay.__set__(self, PAUSE_US)

        @property
        def pthrDelay(self) -> object:  # noqa: N802 - NIXL's name
            return delay.__get__(self)

        @pthrDelay.setter
        def pthrDelay(self, value: object) -> None:  # noqa: N802
            """Ignore the value."""

    class PacedBindings:
        """The bindings with the paced config."""

        nixlAgentConfig = Paced  # noqa: N815 - NIXL's name

        def __getattr__(self, name: str) -> object:
            return getattr(bindings, name)

    _api.nixlBind = PacedBindings()
    return True
