"""The settings collected from the declarations of all packages."""

import subprocess
import sys
from typing import Annotated, NamedTuple

import pytest

from headrace.base.setting import Setting
from headrace.config import options
from headrace.config.options import (
    SECTIONS,
    PlannerSettings,
    Section,
    all_options,
    find,
    find_variable,
    fleet_times,
    for_fleet,
    options_of,
    section_options,
)


def test_every_key_flag_and_variable_is_found_by_name() -> None:
    found = all_options()
    assert len({option.key for option in found}) == len({option.env for option in found}) == len(found) > 120
    for option in found:
        assert find(option.key) is option
        assert find_variable(option.env) is option
    assert find("frontend.prot") is None
    assert find("frontends.port") is None
    assert find_variable("HEADRACE_FRONTEND_PROT") is None


def test_a_command_has_exactly_the_settings_that_name_it() -> None:
    """`options_of` imports only sections that a command may use: no section may hold settings of a command it does not list."""
    for command in ("up", "frontend", "worker", "router", "streams", "control", "model"):
        assert options_of(command) == [option for option in all_options() if command in option.commands]  # type: ignore[arg-type]


def test_settings_are_listed_behind_the_one_they_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class First(NamedTuple):
        a: Annotated[int, Setting("A.")] = 1
        d: Annotated[int, Setting("D.", after="x.c")] = 4
        e: Annotated[int, Setting("E.")] = 5

    class Second(NamedTuple):
        b: Annotated[int, Setting("B.")] = 2
        c: Annotated[int, Setting("C.")] = 3

    monkeypatch.setitem(SECTIONS, "x", Section("x", ("up",), lambda: (First, Second)))
    assert [option.key for option in options._collect("x")] == ["x.a", "x.b", "x.c", "x.d", "x.e"]
    monkeypatch.setitem(SECTIONS, "x", Section("x", ("up",), lambda: (First,)))
    with pytest.raises(ValueError, match=r"x\.c"):
        list(options._collect("x"))


def test_a_section_is_collected_once() -> None:
    assert section_options("router") is section_options("router")


def modules_of(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_declarations_load_nothing_heavy() -> None:
    loaded = modules_of("from headrace.config.options import all_options\nall_options()")
    heavy = {"asyncio", "numpy", "structlog", "msgspec", "msgpack", "nats", "ssl", "starlette", "uvicorn", "urllib.request"}
    assert not loaded & heavy
    ours = {name for name in loaded if name.startswith("headrace.")}
    packages = tuple(f"headrace.{name}." for name in ("broker", "router", "workers", "frontend"))
    others = {
        "headrace.router.errors",
        "headrace.router.index.types",
        "headrace.workers.adapter_source",
        "headrace.workers.errors",
    }
    assert {
        name for name in ours if name.startswith(packages) and not name.endswith((".settings", ".placement", ".replica"))
    } <= (others | {"headrace.broker.batches", "headrace.router.index", "headrace.router.placement.fairness"})


def test_a_command_loads_only_the_sections_that_it_uses() -> None:
    loaded = modules_of("from headrace.config.settings import load\nload('worker', flags={'worker.slots': '2'})")
    assert "headrace.workers.settings" in loaded
    assert not {"headrace.frontend.settings", "headrace.router.settings", "headrace.jetstream.settings"} & loaded
    assert "headrace.workers.settings" not in modules_of("from headrace.cli import build_parser\nbuild_parser()")


def test_a_fleet_that_is_there_for_another_target_is_planned_for_that_one() -> None:
    settings = PlannerSettings(ttft_s=2.0, fleet_ttft="dear=0.3, cheap=5")
    assert [for_fleet(settings, fleet).ttft_s for fleet in ("dear", "cheap", "other", "")] == [0.3, 5.0, 2.0, 2.0]
    assert for_fleet(settings, "dear").miss == settings.miss


@pytest.mark.parametrize("chosen", ["dear", "=1", "dear=", "dear=soon", "dear=0", "dear=-1", "dear=inf", "dear=nan", "a=1,a=2"])
def test_what_is_no_time_of_a_fleet_is_refused_with_its_name(chosen: str) -> None:
    with pytest.raises(ValueError, match="fleet_ttft"):
        PlannerSettings(fleet_ttft=chosen)


def test_nothing_is_named_by_default() -> None:
    assert fleet_times("") == {}
