"""The settings of KV tiers become vLLM's connector, or stop the start with the value that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.jetstream.context import ConnectOptions
from headrace.jetstream.subjects import Subjects
from headrace.workers.broker_access import BrokerAccess
from headrace.workers.engine import EngineConfig, Role
from headrace.workers.errors import EngineStartFailed
from headrace.workers.vllm.tiers.settings import GIB, Tiers, offload_config, prepare_tiers, tiers_of


def config(role: Role = Role.AGGREGATED) -> EngineConfig:
    return EngineConfig(model="m", served_name="m", role=role)


@pytest.mark.parametrize("args", [{}, {"kv_host_gib": None}, {"kv_transfer_config": {}, "block_size": 32}])
def test_an_engine_has_no_tiers_unless_they_are_asked_for(args: dict[str, Any]) -> None:
    assert tiers_of(args) is None


@pytest.mark.parametrize(("gib", "expected"), [(2, 2 * GIB), (0.25, GIB // 4)])
def test_the_host_tier_has_the_size_that_was_asked_for(gib: float, expected: int) -> None:
    tiers = tiers_of({"kv_host_gib": gib})
    assert tiers is not None
    assert offload_config(config(), tiers, cpu=False)["kv_connector_extra_config"]["cpu_bytes_to_use"] == expected


@pytest.mark.parametrize("wrong", [0, -1, "much", True, float("nan"), float("inf"), 1 << 20])
def test_a_size_that_is_none_stops_the_start(wrong: Any) -> None:
    with pytest.raises(EngineStartFailed, match=r"kv_host_gib is a number of GiB above 0, not "):
        tiers_of({"kv_host_gib": wrong})


@pytest.mark.parametrize(
    ("name", "value"),
    [("kv_transfer_config", {"kv_connector": "X"}), ("kv_transfer_mode", "pull"), ("kv_offloading_size", 1.0)],
)
def test_two_settings_that_choose_the_connector_are_refused(name: str, value: Any) -> None:
    with pytest.raises(EngineStartFailed, match=f"kv_host_gib and {name} choose"):
        tiers_of({"kv_host_gib": 1, name: value})


def test_tiers_without_a_prefix_cache_are_refused() -> None:
    with pytest.raises(EngineStartFailed, match="enable_prefix_caching=false"):
        tiers_of({"kv_host_gib": 1, "enable_prefix_caching": False})


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_role_that_hands_blocks_over_has_no_tiers(role: Role) -> None:
    with pytest.raises(EngineStartFailed, match=f"this one has the role '{role.value}'"):
        offload_config(config(role), Tiers(host_bytes=GIB), cpu=False)


def test_a_gpu_gets_the_spec_that_vllm_brings_and_a_cpu_ours() -> None:
    gpu = offload_config(config(), Tiers(host_bytes=GIB), cpu=False)
    assert gpu["kv_connector"] == "OffloadingConnector"
    assert gpu["kv_connector_extra_config"] == {"cpu_bytes_to_use": GIB}
    cpu = offload_config(config(), Tiers(host_bytes=GIB), cpu=True)
    assert cpu["kv_connector_extra_config"]["spec_module_path"] == "headrace.workers.vllm.tiers.cpu_spec"


def test_every_start_is_another_engine_to_vllm() -> None:
    first, second = (offload_config(config(), Tiers(host_bytes=GIB), cpu=True) for _ in range(2))
    assert first["engine_id"] != second["engine_id"]


@pytest.mark.parametrize("name", ["kv_disk_folder", "kv_disk_gib", "kv_store", "kv_store_wait_s"])
def test_a_tier_behind_the_host_tier_needs_it(name: str) -> None:
    with pytest.raises(EngineStartFailed, match=f"{name} is behind the host tier: give kv_host_gib too"):
        tiers_of({name: 1})


def disk_tier(args: dict[str, Any], *, cpu: bool) -> dict[str, Any]:
    tiers = tiers_of({"kv_host_gib": 1} | args)
    assert tiers is not None
    assert tiers.outlive
    extra: dict[str, Any] = offload_config(EngineConfig(model="m", served_name="m", args=args), tiers, cpu=cpu)[
        "kv_connector_extra_config"
    ]
    assert extra["spec_name"] == ("CpuTieredSpec" if cpu else "TieringOffloadingSpec")
    (tier,) = extra["secondary_tiers"]
    return tier  # type: ignore[no-any-return]


@pytest.mark.parametrize("cpu", [True, False])
def test_a_disk_tier_is_bounded_and_loaded_from_our_module(cpu: bool) -> None:
    tier = disk_tier({"kv_disk_folder": "/kv", "revision": "v1"}, cpu=cpu)
    assert (tier["type"], tier["module_path"]) == ("disk", "headrace.workers.vllm.tiers.manager")
    assert (tier["folder"], tier["max_bytes"], tier["model"], tier["revision"]) == ("/kv", 32 * GIB, "m", "v1")
    assert disk_tier({"kv_disk_folder": "/kv", "kv_disk_gib": 0.5}, cpu=cpu)["max_bytes"] == GIB // 2


def test_settings_that_change_blocks_are_told_to_the_tier_and_those_of_tiers_are_not() -> None:
    plain = disk_tier({"kv_disk_folder": "/kv"}, cpu=True)["settings"]
    assert disk_tier({"kv_disk_folder": "/other", "kv_disk_gib": 1}, cpu=True)["settings"] == plain
    assert disk_tier({"kv_disk_folder": "/kv", "dtype": "float32"}, cpu=True)["settings"] != plain


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"kv_disk_gib": 1}, "kv_disk_gib is the size of the files below kv_disk_folder"),
        ({"kv_disk_folder": " "}, "kv_disk_folder is a folder, not ' '"),
        ({"kv_disk_folder": 3}, "kv_disk_folder is a folder, not 3"),
        ({"kv_disk_folder": "/kv", "kv_disk_gib": 0}, "kv_disk_gib is a number of GiB above 0, not 0"),
        ({"kv_disk_folder": "/kv", "prefix_caching_hash_algo": "xxhash"}, "prefix_caching_hash_algo=xxhash"),
        ({"kv_disk_folder": "/kv", "adapters": {"a": "/a"}}, "vLLM knows adapters by name and folder"),
        ({"kv_disk_folder": "/kv", "enable_lora": True}, "vLLM knows adapters by name and folder"),
    ],
)
def test_a_disk_tier_that_cannot_be_right_stops_the_start(args: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineStartFailed, match=message):
        tiers_of({"kv_host_gib": 1} | args)


def test_an_engine_with_a_host_tier_alone_may_have_adapters() -> None:
    tiers = tiers_of({"kv_host_gib": 1, "adapters": {"a": "/a"}, "prefix_caching_hash_algo": "xxhash"})
    assert tiers is not None
    assert not tiers.outlive


def test_a_store_has_a_wait_and_the_file_by_which_it_is_reached(tmp_path: Path) -> None:
    args = {"kv_host_gib": 1, "kv_store": True}
    access = BrokerAccess(ConnectOptions(), Subjects(), "p")
    given = EngineConfig(model="m", served_name="m", args=args, broker=access)
    path = prepare_tiers(given, tmp_path)
    assert path is not None
    assert BrokerAccess.read(path) == access
    tiers = tiers_of(args)
    assert tiers is not None
    (tier,) = offload_config(given, tiers, cpu=True, access=path)["kv_connector_extra_config"]["secondary_tiers"]
    assert (tier["type"], tier["access"], tier["wait_s"]) == ("store", str(path), 2.0)
    slow = tiers_of(args | {"kv_store_wait_s": 5})
    assert slow is not None
    assert slow.store_wait_s == 5.0


@pytest.mark.parametrize("args", [{}, {"kv_host_gib": 1}, {"kv_host_gib": 1, "kv_store": False}])
def test_without_a_store_no_login_is_written(tmp_path: Path, args: dict[str, Any]) -> None:
    access = BrokerAccess(ConnectOptions(), Subjects(), "p")
    assert prepare_tiers(EngineConfig(model="m", served_name="m", args=args, broker=access), tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_store_without_a_broker_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(EngineStartFailed, match="this one has no broker"):
        prepare_tiers(EngineConfig(model="m", served_name="m", args={"kv_host_gib": 1, "kv_store": True}), tmp_path)


def test_the_disk_is_asked_before_the_store() -> None:
    tiers = tiers_of({"kv_host_gib": 1, "kv_store": True, "kv_disk_folder": "/kv"})
    assert tiers is not None
    behind = offload_config(config(), tiers, cpu=True)["kv_connector_extra_config"]["secondary_tiers"]
    assert [tier["type"] for tier in behind] == ["disk", "store"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"kv_store": "yes"}, "kv_store is true or false, not 'yes'"),
        ({"kv_store_wait_s": 1}, "kv_store_wait_s is the most that a request waits for kv_store=true"),
        ({"kv_store": True, "kv_store_wait_s": 0}, "kv_store_wait_s is a number of seconds above 0, 60 at most, not 0"),
        ({"kv_store": True, "kv_store_wait_s": 61}, "60 at most, not 61"),
        ({"kv_store": True, "kv_store_wait_s": True}, "60 at most, not True"),
        ({"kv_store": True, "enable_lora": True}, "vLLM knows adapters by name and folder"),
    ],
)
def test_a_store_that_cannot_be_right_stops_the_start(args: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineStartFailed, match=message):
        tiers_of({"kv_host_gib": 1} | args)


def test_the_folder_of_a_disk_tier_is_made_and_one_that_cannot_be_is_named(tmp_path: Path) -> None:
    def given(folder: Path) -> EngineConfig:
        return EngineConfig(model="m", served_name="m", args={"kv_host_gib": 1, "kv_disk_folder": str(folder)})

    assert prepare_tiers(given(tmp_path / "a" / "kv"), tmp_path) is None
    assert (tmp_path / "a" / "kv").stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineStartFailed, match=r"kv_disk_folder .*/file/kv: Not a directory"):
        prepare_tiers(given(tmp_path / "file" / "kv"), tmp_path)
