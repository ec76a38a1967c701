"""`headrace bench replay` on the shipped slice."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import structlog

from headrace.cli import main
from headrace.router.index.view import IMPLEMENTATION_VARIABLE
from headrace.router.placement import policies


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    logging.captureWarnings(False)
    structlog.reset_defaults()


@pytest.fixture(autouse=True)
def _index_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a C compiler there is no compiled one, and each index and policy would say so on standard error."""
    if find_spec("headrace.router.index._table") is None:
        monkeypatch.setenv(IMPLEMENTATION_VARIABLE, "pure")
    if not policies.kernel.COMPILED:
        monkeypatch.setattr(policies, "_log", mock.Mock())


def replayed(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["bench", "replay", "--json", "--quiet", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


@pytest.mark.slow
def test_all_policies_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    report = replayed(capsys, "--requests", "25", "--workers", "4", "--blocks", "200,400", "--rate", "2,4")
    assert report["trace"]["requests"] == 25
    small, large = report["scenarios"]
    assert (small["blocks"], large["blocks"], small["workers"]) == (200, 400, 4)
    assert small["ceiling"]["pooled_blocks"] == 800
    names = [(run["summary"]["policy"].split()[0], run["summary"]["rate"]) for run in small["runs"]]
    policies = ["kv", "classic", "least-loaded", "round-robin", "random", "power-of-two"]
    assert names == [(name, rate) for rate in (2.0, 4.0) for name in policies]
    for run in small["runs"]:
        assert 0 <= run["summary"]["hit_rate"] <= run["summary"]["of_infinite"] <= 1
        assert run["summary"]["ttft_s"]["p50"] <= run["summary"]["e2e_s"]["p50"]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_figures(capsys: pytest.CaptureFixture[str]) -> None:
    def figures(seed: str) -> Any:
        options = ("--requests", "40", "--policy", "kv,random", "--routers", "2", "--rate", "3", "--seed", seed)
        runs = replayed(capsys, *options)["scenarios"][0]["runs"]
        return [{key: value for key, value in run["summary"].items() if key not in ("cpu_s", "seed")} for run in runs]

    assert figures("1") == figures("1")
    assert figures("1") != figures("2")


def test_one_after_the_other_with_several_routers(capsys: pytest.CaptureFixture[str]) -> None:
    report = replayed(capsys, "--requests", "60", "--sequential", "--routers", "1,2", "--policy", "kv")
    assert [(s["routers"], len(s["sequential"])) for s in report["scenarios"]] == [(1, 1), (2, 1)]


def test_made_up_traces_classes_and_tenants(capsys: pytest.CaptureFixture[str]) -> None:
    report = replayed(
        capsys, "--generate", "conversations", "--requests", "60", "--policy", "kv", "--rate", "4",
        "--classes", "hi:1,std:2", "--tenants", "3", "--tenant-weights", "t0:2", "--set", "ageing=0.1",
    )  # fmt: skip
    (run,) = report["scenarios"][0]["runs"]
    assert {t["tenant"]: t["weight"] for t in run["tenants"]}["t0"] == 2.0
    assert set(run["summary"]["classes"]) == {"hi", "std"}


def test_tables_and_progress(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "replay", "--requests", "40", "--policy", "kv,round-robin+early"]) == 0
    out, err = capsys.readouterr()
    assert "POLICY" in out
    assert "8 workers × 2000 blocks, 1 router" in out
    assert err.splitlines()[1].startswith("round-robin+early at rate 1: TTFT p90 ")


def test_dynamo_beside_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("zmq")  # comes with the engines
    stand_in = Path(__file__).parents[3] / "support" / "router" / "dynamo_stand_in"
    python = tmp_path / "dynamo" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nPYTHONPATH={stand_in} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    options = ["--requests", "20", "--policy", "classic,dynamo", "--environments", str(tmp_path)]
    report = replayed(capsys, *options)
    assert [run["summary"]["policy"].split()[0] for run in report["scenarios"][0]["runs"]] == ["classic", "dynamo"]
    assert report["dynamo"]["decisions"] == report["dynamo"]["lowest"] == 20 * 6  # each weight once
    assert main(["bench", "replay", "--quiet", *options]) == 0
    told = "dynamo: 120 decisions, cached blocks, blocks in use and lowest cost as in classic in 100.00%/100.00%/100.00%; "
    assert told in capsys.readouterr().out


def test_a_file_of_your_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 2, "hash_ids": [1]}\n')
    report = replayed(capsys, str(path), "--policy", "kv")
    assert report["trace"] == {
        "name": str(path), "requests": 1, "duration_s": 0.0, "requests_per_s": 1.0, "blocks": 1, "mean_tokens": 5.0,
        "mean_output": 2.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["missing.jsonl"], "missing.jsonl: No such file or directory"),
        (["some.jsonl", "--generate", "one-shot"], "a trace or --generate, not both"),
        (["--policy", "best"], "policy 'best': there are kv, classic"),
        (["--policy", "kv", "--set", "agein=1"], "no setting 'agein'"),
        (["--policy", "dynamo", "--environments", "nowhere"], "no Dynamo: there is no nowhere/dynamo/bin/python"),
    ],
)
def test_what_cannot_be_replayed(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "replay", "--quiet", *arguments]) == 1
    err = capsys.readouterr().err
    assert err.startswith("headrace bench replay: ")
    assert told in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--workers", "0"),
        ("--workers", "two"),
        ("--blocks", "100,x"),
        ("--rate", "-1"),
        ("--rate", "nan"),
        ("--classes", "hi:0"),
        ("--classes", "hi:1,hi:2"),
        ("--tenants", "0"),
        ("--set", "ageing"),
        ("--generate", "other"),
    ],
)
def test_wrong_values_of_options(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "replay", option, value])
    assert ended.value.code == 2
    assert option in capsys.readouterr().err


def test_bench_alone_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2
    assert "replay" in capsys.readouterr().err


def test_help_of_other_commands_does_not_load_it() -> None:
    code = (
        "import sys; from headrace.cli import build_parser; build_parser(); "
        "sys.exit('headrace.tools.replay_bench.report' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
