"""Copies between two pools in the machine's memory, and the streams that order nothing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest

from headrace.workers.sglang import cpu_plugin
from headrace.workers.sglang.cpu_plugin import NotInstalled, copy_pages, in_host_memory, nothing, prepare, stand_in


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


NAME = "headrace_no_such_package"


@pytest.fixture
def absent() -> Iterator[None]:
    before, modules = list(sys.meta_path), set(sys.modules)
    yield
    sys.meta_path[:] = before
    for name in set(sys.modules) - modules:
        if name.startswith(NAME):
            del sys.modules[name]


@pytest.mark.usefixtures("absent")
def test_a_missing_package_can_be_imported_derived_from_and_decorate_but_not_be_called() -> None:
    assert stand_in((NAME, "json")) == (NAME,)
    module = importlib.import_module(f"{NAME}.deep.inside")

    class Derived(module.Base):  # type: ignore[misc,name-defined]  # there is no such class
        def __init__(self, size: int) -> None:
            self.size = size

    @module.register
    def decorated() -> int:
        return 3

    assert Derived(2).size == 2
    assert decorated() == 3
    with pytest.raises(NotInstalled, match=f"{NAME}.deep.inside.kernel"):
        module.kernel(1, 2)


@pytest.mark.usefixtures("absent")
def test_installed_packages_and_a_second_call_change_nothing() -> None:
    assert stand_in(("json",)) == ()
    assert stand_in((NAME,)) == (NAME,)
    assert stand_in((NAME,)) == ()


def test_nothing_stands_in_where_it_was_not_called() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(NAME)


def test_every_layer_is_named_the_machines_own_memory() -> None:
    assert cpu_plugin.in_host_memory(lambda kinds, count: ["VRAM"] * count, None, 3) == ["DRAM"] * 3


def test_the_progress_thread_is_paced_before_the_agent_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    paced: list[bool] = []
    monkeypatch.setattr(cpu_plugin, "pace_nixl", lambda: paced.append(True))
    (hook,) = [hook for hook in cpu_plugin.NIXL_MEMORY_HOOKS if hook.target.endswith("NixlKVManager.__init__")]
    assert hook.kind == "before"
    hook.function("manager", "arguments", server_args="anything")
    assert paced == [True]


@pytest.mark.parametrize(("idle", "pauses"), [(False, [cpu_plugin.PAUSE_S]), (True, [])], ids=["it waits", "it has nothing"])
def test_only_a_scheduler_that_waits_for_pages_is_paused(
    idle: bool, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(cpu_plugin, "time", SimpleNamespace(sleep=slept.append))
    turns: list[object] = []
    scheduler = SimpleNamespace(is_fully_idle=lambda: idle)
    cpu_plugin.pause(turns.append, scheduler)
    assert (turns, slept) == ([scheduler], pauses)


def test_a_paused_scheduler_rests_in_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(cpu_plugin, "time", SimpleNamespace(sleep=slept.append))
    turns: list[object] = []
    scheduler = SimpleNamespace()
    cpu_plugin.rest(turns.append, scheduler)
    assert (turns, slept) == ([scheduler], [cpu_plugin.PAUSE_S])
