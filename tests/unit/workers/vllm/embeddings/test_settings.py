from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.workers.engine import EngineConfig, Role
from headrace.workers.errors import EngineStartFailed
from headrace.workers.vllm.embeddings.settings import check_encoders, encoder_word, hands_over_embeddings, transfer_config


def config(role: Role = Role.AGGREGATED, model: str = "m", **args: Any) -> EngineConfig:
    return EngineConfig(model=model, served_name="m", role=role, args=args)


def test_embeddings_pass_where_they_are_asked_for() -> None:
    assert hands_over_embeddings(config(encoders=True))
    assert hands_over_embeddings(config(Role.DECODE, encoders=True))
    assert hands_over_embeddings(config(Role.ENCODE))
    assert not hands_over_embeddings(config())
    assert not hands_over_embeddings(config(encoders=False))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (config(encoders="yes"), "encoders is true or false, not 'yes'"),
        (config(Role.ENCODE, encoders=True), "role 'encode' is an encoder"),
        (config(encoders=True, ec_transfer_config={}), "ec_transfer_config"),
        (config(Role.ENCODE, ec_transfer_config={}), "ec_transfer_config"),
        (config(encoders=True, nnodes=2), "several machines"),
        (config(Role.ENCODE, node_rank=1), "several machines"),
        (config(Role.ENCODE, kv_transfer_mode="push"), "kv_transfer_mode"),
        (config(Role.ENCODE, kv_offloading_size=1), "kv_offloading_size"),
        (config(Role.ENCODE, enable_lora=True), "enable_lora"),
    ],
)
def test_settings_that_contradict_each_other_are_named(given: EngineConfig, told: str) -> None:
    with pytest.raises(EngineStartFailed, match=told):
        hands_over_embeddings(given)


def test_a_value_that_cannot_be_is_named_before_anything_starts() -> None:
    check_encoders({"encoders": True})
    check_encoders({})
    with pytest.raises(EngineStartFailed, match=r"not 1\.5"):
        check_encoders({"encoders": 1.5})


def test_an_encode_worker_writes_what_the_others_read() -> None:
    made = [transfer_config(role, Path("/f")) for role in (Role.ENCODE, Role.AGGREGATED, Role.DECODE)]
    assert [one["ec_role"] for one in made] == ["ec_producer", "ec_consumer", "ec_consumer"]
    assert {one["ec_connector_extra_config"]["folder"] for one in made} == {"/f"}


def test_engines_have_equal_words_if_they_make_equal_embeddings(tmp_path: Path) -> None:
    def word(weights: bytes = b"W" * 8, *, dtype: str = "float32", version: str = "1", device: str = "cpu", **args: Any) -> str:
        (tmp_path / "model.bin").write_bytes(weights)
        return encoder_word(config(model=str(tmp_path), **args), version=version, dtype=dtype, device=device)

    same = word()
    assert word(encoders=True, max_model_len=9, kv_transfer_mode="push", max_num_seqs=3, dtype_="x") != same
    assert word(encoders=True, max_model_len=9, kv_transfer_mode="push", max_num_seqs=3) == same
    others = [
        word(b"V" * 8),
        word(dtype="bfloat16"),
        word(version="2"),
        word(device="cuda"),
        word(quantization="fp8"),
        word(mm_processor_kwargs={"size": 1}),
    ]
    assert len({same, *others}) == 1 + len(others)
