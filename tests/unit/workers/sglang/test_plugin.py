from __future__ import annotations

import sys
from enum import Enum
from types import ModuleType
from typing import Any

import pytest

from headrace.workers.sglang import plugin
from headrace.workers.sglang.cpu_plugin import stay, unpinned


class Kinds(Enum):
    """As SGLang names them."""

    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"


class Registry:
    """A stand-in for SGLang's, which is not installed where unit tests run."""

    def __init__(self) -> None:
        self.targets: list[str] = []

    def register(self, target: str, hook: Any, kind: Kinds) -> None:
        assert isinstance(kind, Kinds)
        self.targets.append(target)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    made = Registry()
    module = ModuleType("sglang.srt.plugins.hook_registry")
    module.HookRegistry, module.HookType = made, Kinds  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", module)
    return made


def test_all_hooks_are_registered_on_the_cpu(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    plugin.install()
    assert registry.targets == [hook.target for hook in (*plugin.EVERYWHERE, *plugin.HOOKS)]
    assert "torch.Tensor.pin_memory" in registry.targets


def test_on_a_gpu_only_what_every_device_needs_is_registered(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    plugin.install()
    assert registry.targets == [hook.target for hook in plugin.EVERYWHERE]


def test_pinned_memory_is_not_asked_for() -> None:
    assert unpinned(dict, a=1, pin_memory=True) == {"a": 1}
    assert stay("tensor", "device") == "tensor"
