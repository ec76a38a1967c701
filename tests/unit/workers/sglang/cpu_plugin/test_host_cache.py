"""Copies between two pools in the machine's memory, and the streams that order nothing."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from headrace.workers.sglang.cpu_plugin.host_cache import copy_pages, nothing, prepare
from headrace.workers.sglang.cpu_plugin.nixl_memory import in_host_memory


def test_tokens_are_copied_layer_by_layer_to_their_new_places() -> None:
    torch = pytest.importorskip("torch")
    source = [torch.arange(8.0).reshape(8, 1) + 100 * layer for layer in range(2)]
    target = [torch.zeros(8, 1) for _ in range(2)]
    copy_pages(source, target, torch.tensor([6, 7]), torch.tensor([0, 3]), 2)
    assert [layer[:, 0].tolist() for layer in target] == [[6, 0, 0, 7, 0, 0, 0, 0], [106, 0, 0, 107, 0, 0, 0, 0]]


def test_a_stream_on_a_cpu_has_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cpu, "Stream", type("Stream", (torch.cpu.Stream,), {}))
    package, pool = ModuleType("sglang.srt.mem_cache.pool_host"), ModuleType("sglang.srt.mem_cache.pool_host.mha")
    package.mha = pool  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.mem_cache"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, pool.__name__, pool)
    prepare()
    assert pool.transfer_kv_direct is copy_pages
    stream = torch.cpu.Stream()
    assert stream.query()
    assert stream.synchronize() is None
    assert nothing(1, a=2) is None


def test_all_layers_are_in_host_memory() -> None:
    assert in_host_memory(lambda kinds, expected: ["VRAM"] * expected, None, 3) == ["DRAM"] * 3
