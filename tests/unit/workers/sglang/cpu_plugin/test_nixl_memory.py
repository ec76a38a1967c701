from __future__ import annotations

import pytest

from headrace.workers.sglang.cpu_plugin import nixl_memory


def test_every_layer_is_named_the_machines_own_memory() -> None:
    assert nixl_memory.in_host_memory(lambda kinds, count: ["VRAM"] * count, None, 3) == ["DRAM"] * 3


def test_the_progress_thread_is_paced_before_the_agent_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    paced: list[bool] = []
    monkeypatch.setattr(nixl_memory, "pace_nixl", lambda: paced.append(True))
    (hook,) = [hook for hook in nixl_memory.HOOKS if hook.target.endswith("NixlKVManager.__init__")]
    assert hook.kind == "before"
    hook.function("manager", "arguments", server_args="anything")
    assert paced == [True]
