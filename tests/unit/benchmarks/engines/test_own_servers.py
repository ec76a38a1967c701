from benchmarks.engines.own_servers import flags


def test_settings_become_the_flags_of_the_engine() -> None:
    given = {"max_model_len": 1024, "dtype": "bfloat16", "enforce_eager": True, "enable_prefix_caching": False}
    assert flags(given) == [
        *("--max-model-len", "1024", "--dtype", "bfloat16", "--enforce-eager"),
        "--no-enable-prefix-caching",
    ]
