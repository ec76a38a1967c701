"""The timing model and the engine arguments."""

from __future__ import annotations

import pytest

from headrace.workers.errors import EngineStartFailed
from headrace.workers.sim.settings import PRESETS, TimingModel, parse_settings


def step(preset: str, prefill: int = 0, sequences: int = 0, context: int = 0) -> float:
    return PRESETS[preset].step_s(prefill_tokens=prefill, sequences=sequences, context_tokens=context)


def test_cpu_small_is_what_was_measured():
    assert 1 / step("cpu-small", sequences=1) == pytest.approx(46, rel=0.01)
    assert 8 / step("cpu-small", sequences=8) == pytest.approx(300, rel=0.01)
    assert 1536 / step("cpu-small", prefill=1536) == pytest.approx(850, rel=0.01)


def test_a_step_is_the_sum_of_its_parts_divided_by_the_speedup():
    model = TimingModel(
        prefill_tokens_per_s=100.0, decode_base_s=0.5, decode_per_sequence_s=0.25, decode_per_context_token_s=0.125, speedup=2.0
    )
    assert model.step_s(prefill_tokens=50, sequences=4, context_tokens=8) == (0.5 + 0.5 + 1.0 + 1.0) / 2


def test_instant_takes_no_time():
    assert step("instant", prefill=10_000, sequences=64, context=1_000_000) == 0
    assert [name for name, model in PRESETS.items() if model.instant] == ["instant"]


def test_arguments_may_be_text():
    settings = parse_settings(
        {
            "blocks": "2048",
            "speedup": "2.5",
            "allow_request_faults": "true",
            "faults": '{"slow": 2.0, "crash_at_token": 5}',
            "timing": "cpu-small",
            "timing_overrides": '{"decode_base_s": 0.01}',
        }
    )
    assert (settings.blocks, settings.speedup, settings.allow_request_faults) == (2048, 2.5, True)
    assert (settings.faults.slow, settings.faults.crash_at_token) == (2.0, 5)
    assert settings.timing_model().decode_base_s == 0.01
    assert settings.timing_model().speedup == 2.5


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"blokcs": 3}, ["blokcs", "blocks"]),
        ({"blocks": 0}, ["blocks", "0"]),
        ({"blocks": "many"}, ["blocks", "many"]),
        ({"timing": "warp"}, ["warp", "cpu-small"]),
        ({"timing_overrides": {"speed": 1.0}}, ["speed", "decode_base_s"]),
        ({"timing_overrides": {"decode_base_s": -1.0}}, ["decode_base_s", "-1"]),
        ({"speedup": 0}, ["speedup", "0"]),
        ({"faults": {"explode": True}}, ["faults", "explode"]),
        ({"faults": "{"}, ["faults", "JSON"]),
        ({"slots": 100, "step_tokens": 50}, ["slots", "100", "step_tokens", "50"]),
        ({"blocks": 10, "context_length": 1000}, ["context_length", "1000", "blocks", "10"]),
        ({"mean_output_tokens": 0.5}, ["mean_output_tokens", "0.5"]),
        ({"timing_overrides": {"kv_bytes_per_token": -1.0}}, ["kv_bytes_per_token", "-1"]),
        ({"timing_overrides": {"disk_bytes_per_s": 0.0}}, ["disk_bytes_per_s", "0"]),
        ({"host_blocks": -1}, ["host_blocks", "-1"]),
        ({"disagg": "magic"}, ["disagg", "magic"]),
        ({"transfer_mode": "throw"}, ["transfer_mode", "throw"]),
        ({"lease_s": 0}, ["lease_s", "0"]),
        ({"faults": {"kv_drop_every": 0}}, ["kv_drop_every"]),
    ],
)
def test_a_bad_argument_is_named_with_its_value(args, words):
    with pytest.raises(EngineStartFailed) as failed:
        parse_settings(args)
    assert all(word in str(failed.value) for word in words), str(failed.value)


def test_moving_blocks_takes_their_bytes_over_the_rate_and_a_little_per_descriptor():
    small = PRESETS["cpu-small"]
    block = 32 * 23_040
    assert small.transfer_s(tokens=10 * 32, descriptors=3) == pytest.approx(10 * block / 5e9 + 3 * 8e-6)
    assert small.load_s("host", 32) == pytest.approx(block / 5e9)
    assert small.load_s("disk", 32) == pytest.approx(block / 1e9)
    fast = TimingModel(kv_bytes_per_token=10.0, host_bytes_per_s=5.0, transfer_bytes_per_s=2.0, speedup=2.0)
    assert (fast.load_s("host", 3), fast.transfer_s(tokens=3, descriptors=9)) == (3.0, 7.5)
    assert PRESETS["instant"].transfer_s(tokens=10**6, descriptors=10**6) == 0
