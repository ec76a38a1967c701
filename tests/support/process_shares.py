"""Which tests run in one process when they run in several (`pytest -n 2 --dist loadfile`), and in which order.

All tests of a file run in one process, and so do files that share something dear: an engine is started once for all of them.
Node ids stay as they are, unlike with `--dist loadgroup`: what failed can be named, and tried again, without xdist.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

ENGINES = "tests/engines/"
BENCH = (
    "test_vllm.py",
    "test_vllm_kv_events.py",
    "test_parsers_engine.py",
    "test_vllm_contract.py",
)  # one engine in the tests' own process

# Groups of tests/engines, the longest first: the last one should not be one that the other process waits for.
FIRST = (
    "served",
    "test_sglang_served.py",
    "test_sglang_contract.py",
    "test_embeddings.py",
    "test_vllm_disagg.py",
    "test_vllm_two_workers.py",
    "test_served_disagg.py",
)
LAST = ("test_vllm_adapters.py", "test_bundled_model.py")

EARLY = ("tests/integration/headrace/test_planner.py",)  # waits for a minute and a half, which nothing else that is left does

NO_KILLS = ("tests/docs/", "tests/simulation/", "tests/unit/")  # the Makefile's run of tests that kill leaves them out


def share_of(node_id: str) -> str:
    """The group that a test belongs to: its file, or the name of what it shares with other files."""
    file = node_id.split("::", 1)[0]
    if not file.startswith(ENGINES):
        return file
    name = file.removeprefix(ENGINES)
    if name in BENCH:
        return "bench"
    return name.split("/", 1)[0]


def ordered(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The tests with engines by their groups, in the order of `FIRST`, the rest, `LAST`; all others stay, but for `EARLY`."""
    places = {name: n - len(FIRST) for n, name in enumerate(FIRST)} | {name: n + 2 for n, name in enumerate(LAST)}

    def place(item: pytest.Item) -> tuple[int, str]:
        if not item.nodeid.startswith(ENGINES):
            return (-len(FIRST) - 1 if item.nodeid.startswith(EARLY) else 0), ""
        share = share_of(item.nodeid)
        return places.get(share, 1), share

    return sorted(items, key=place)


def left_out(items: Iterable[pytest.Item]) -> list[str]:
    """Tests that kill where `make test` does not look for any."""
    return [item.nodeid for item in items if item.nodeid.startswith(NO_KILLS) and item.get_closest_marker("fault")]
