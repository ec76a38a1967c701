"""The modules on the ways of a request are those that it enters, and the same in each run."""

from __future__ import annotations

from tests.simulation.cost.walks import chat_walks, walks


def folders(modules: list[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules}


def test_each_leg_is_of_its_process_and_the_chat_of_all() -> None:
    found = walks()
    legs = {name: set(found[name]) for name in ("HTTP → REQ", "REQ → WORK", "WORK → engine", "token back")}
    assert set.union(*legs.values()) <= set(found["a chat, all legs"])
    assert {name: folders(found[name]) & {"frontend", "router", "workers", "planner"} for name in found} == {
        "HTTP → REQ": {"frontend"},
        "REQ → WORK": {"router"},
        "WORK → engine": {"workers"},
        "token back": {"frontend", "workers"},
        "KV event → index": {"router", "workers"},
        "planner tick": {"planner"},
        "a chat, all legs": {"frontend", "router", "workers"},
        "batch line": set(),
    }
    assert all(len(modules) > 10 for modules in found.values())
    assert "workers.sim.engine" in found["WORK → engine"]
    again = chat_walks()
    assert {name: again[name] for name in legs} == legs
