"""Which connector vLLM gets, and what an engine with it can be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.workers.engine import EngineConfig, Role
from headrace.workers.errors import EngineStartFailed
from headrace.workers.vllm.transfer_connector import EXTENSION, check_role, connector_config, describe_transfer, handover_word

BOTH = frozenset({Role.AGGREGATED, Role.PREFILL, Role.DECODE})


def config(role: Role = Role.DECODE, **args: Any) -> EngineConfig:
    return EngineConfig(model="m", served_name="m", role=role, args=args)


def vllm_config(extension: str = EXTENSION, **transfer: Any) -> Any:
    transfer = {"kv_connector": None, "kv_role": "kv_both", "kv_connector_extra_config": {}} | transfer
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(**transfer), parallel_config=SimpleNamespace(worker_extension_cls=extension)
    )


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize(
    ("args", "name"), [({}, "Push"), ({"kv_transfer_mode": "push"}, "Push"), ({"kv_transfer_mode": "pull"}, "")]
)
def test_prefill_and_decode_get_a_connector_and_push_is_the_default(role: Role, args: dict[str, str], name: str) -> None:
    made = connector_config(config(role, **args), cpu=True)
    assert made is not None
    assert made["kv_connector"] == f"Nixl{name}Connector"
    assert made["kv_role"] == "kv_both"
    assert made["kv_buffer_device"] == "cpu"
    assert made["kv_load_failure_policy"] == "fail"
    assert made["kv_connector_extra_config"]["kv_lease_duration"] == 30


def test_every_start_is_another_engine_to_its_peers() -> None:
    first, second = (connector_config(config(), cpu=True) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first["engine_id"] != second["engine_id"]


def test_with_a_gpu_the_blocks_stay_where_they_are() -> None:
    made = connector_config(config(), cpu=False)
    assert made is not None
    assert "kv_buffer_device" not in made


def test_an_aggregated_engine_has_a_connector_only_if_it_is_asked_for() -> None:
    assert connector_config(config(Role.AGGREGATED), cpu=True) is None
    assert connector_config(config(Role.AGGREGATED, kv_transfer_mode="pull"), cpu=True) is not None


def test_the_operators_own_connector_is_left_alone() -> None:
    own = {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}
    assert connector_config(config(kv_transfer_config=own), cpu=True) is None
    with pytest.raises(EngineStartFailed, match="give one of them"):
        connector_config(config(kv_transfer_config=own, kv_transfer_mode="pull"), cpu=True)


@pytest.mark.parametrize("mode", ["pop", "", 3])
def test_an_unknown_mode_stops_the_start(mode: Any) -> None:
    with pytest.raises(EngineStartFailed, match=f"push or pull, not {mode!r}"):
        connector_config(config(kv_transfer_mode=mode), cpu=True)


def test_roles_that_are_not_served_stop_the_start() -> None:
    with pytest.raises(EngineStartFailed, match="embedding"):
        connector_config(config(Role.EMBEDDING), cpu=True)


@pytest.mark.parametrize(
    ("kv_role", "roles"),
    [("kv_both", BOTH), ("kv_producer", BOTH - {Role.DECODE}), ("kv_consumer", BOTH - {Role.PREFILL})],
)
def test_what_an_engine_can_be_follows_from_its_configuration(kv_role: str, roles: frozenset[Role]) -> None:
    settings = {"kv_lease_duration": 12}
    made = describe_transfer(vllm_config(kv_connector="NixlConnector", kv_role=kv_role, kv_connector_extra_config=settings))
    assert made is not None
    assert (made.mode, made.roles, made.lease_s, made.extended) == ("pull", roles, 12.0, True)


def test_a_connector_inside_others_counts() -> None:
    inner = [
        {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"},
        {"kv_connector": "NixlPushConnector", "kv_role": "kv_consumer", "kv_connector_extra_config": {"kv_lease_duration": 9}},
    ]
    made = describe_transfer(vllm_config(kv_connector="MultiConnector", kv_connector_extra_config={"connectors": inner}))
    assert made is not None
    assert (made.mode, made.lease_s) == ("push", 9.0)
    assert made.roles == {Role.AGGREGATED, Role.DECODE}


def test_an_extension_of_the_operators_takes_the_place_of_ours() -> None:
    made = describe_transfer(vllm_config(extension="their.Extension", kv_connector="NixlConnector"))
    assert made is not None
    assert not made.extended


def test_other_connectors_hand_nothing_over() -> None:
    assert describe_transfer(SimpleNamespace(kv_transfer_config=None)) is None
    assert describe_transfer(vllm_config(kv_connector="OffloadingConnector")) is None
    assert describe_transfer(vllm_config(kv_connector="MultiConnector")) is None
    check_role(Role.AGGREGATED, None, "OffloadingConnector")
    with pytest.raises(EngineStartFailed, match="OffloadingConnector"):
        check_role(Role.PREFILL, None, "OffloadingConnector")


def test_a_role_against_the_operators_kv_role_stops_the_start() -> None:
    producer = describe_transfer(vllm_config(kv_connector="NixlConnector", kv_role="kv_producer"))
    check_role(Role.PREFILL, producer, "NixlConnector")
    with pytest.raises(EngineStartFailed, match="can be aggregated, prefill, not decode"):
        check_role(Role.DECODE, producer, "NixlConnector")


def word(model: str = "/models/a", dtype: str = "torch.float32", block_size: int = 32, cache: str = "auto") -> str:
    made = SimpleNamespace(
        model_config=SimpleNamespace(
            model=model,
            dtype=dtype,
            get_num_layers=lambda parallel: 30,
            get_total_num_kv_heads=lambda: 3,
            get_head_size=lambda: 64,
        ),
        cache_config=SimpleNamespace(block_size=block_size, cache_dtype=cache),
        parallel_config=None,
    )
    return handover_word("push", "0.32.0", made)


def test_engines_that_vllm_would_keep_apart_have_different_words() -> None:
    assert word() == word()
    assert word().startswith("vllm/push/0.32.0/float32/32/")
    others = [word(model="/models/b"), word(dtype="torch.bfloat16"), word(block_size=64), word(cache="fp8")]
    assert len({word(), *others}) == 5


def test_a_prefill_side_that_pulls_can_read_what_a_decode_side_lends() -> None:
    def extra(role: Role, **args: Any) -> Any:
        made = connector_config(config(role, **args), cpu=True)
        assert made is not None
        return made["kv_connector_extra_config"]

    reading = extra(Role.PREFILL, kv_transfer_mode="pull")
    assert (reading["bidirectional_kv_xfer"], reading["decoder_kv_blocks_ttl"]) == (True, 1)
    assert "bidirectional_kv_xfer" not in extra(Role.DECODE, kv_transfer_mode="pull"), "its answers would keep their blocks"
    assert "bidirectional_kv_xfer" not in extra(Role.PREFILL), "the push connector refuses to start with it"


@pytest.mark.parametrize(
    ("given", "reads", "lends"),
    [
        ({"kv_connector": "NixlConnector", "kv_connector_extra_config": {"bidirectional_kv_xfer": True}}, True, True),
        ({"kv_connector": "NixlConnector"}, False, True),
        ({"kv_connector": "NixlConnector", "kv_role": "kv_producer"}, False, False),
        ({"kv_connector": "NixlPushConnector"}, False, False),
    ],
)
def test_who_lends_and_who_reads_follows_from_the_connector(given: dict[str, Any], reads: bool, lends: bool) -> None:
    made = describe_transfer(vllm_config(**given))
    assert made is not None
    assert (made.reads, made.lends) == (reads, lends)


def test_without_our_extension_nothing_is_lent_because_it_could_not_be_taken_back() -> None:
    made = describe_transfer(vllm_config("operator.Extension", kv_connector="NixlConnector"))
    assert made is not None
    assert not made.lends
