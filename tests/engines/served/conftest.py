"""vLLM's own server and Headrace with the same model and engine arguments, each started once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.engines.conftest import ARGS
from tests.engines.support.own_server import own_server
from tests.support.up_process import RunningUp

MODEL = "small"
ENGINE_START_S = 400.0
PLACES: int = ARGS["max_num_seqs"]
PARSER = ("--tool-call-parser", "hermes", "--enable-auto-tool-choice")


@pytest.fixture(scope="package")
def vllm(tmp_path_factory: pytest.TempPathFactory, model_dir: Path, direct: list[list[int]]) -> Iterator[str]:
    """The URL of vLLM's own server. Depends on `direct` only so that this engine is gone before."""
    flags = [flag for name, value in ARGS.items() for flag in (f"--{name.replace('_', '-')}", str(value))]
    with own_server(tmp_path_factory.mktemp("vllm"), str(model_dir), "--served-model-name", MODEL, *PARSER, *flags) as server:
        yield server.url


@pytest.fixture(scope="package")
def our_up(tmp_path_factory: pytest.TempPathFactory, model_dir: Path, vllm: str) -> Iterator[RunningUp]:
    """Headrace. Started once vLLM's server is up: both at once would take longer than one after the other."""
    flags = [flag for name, value in ARGS.items() for flag in ("--engine-arg", f"{name}={value}")]
    flags += ["--model", str(model_dir), "--served-name", MODEL, "--tool-parser", "hermes", "--reasoning-parser", "none"]
    up = RunningUp(tmp_path_factory.mktemp("ours"), *flags, engine="vllm")
    try:
        up.until("ready", lambda: up.state()["ready"], ENGINE_START_S)
        yield up
        up.process.terminate()
        assert up.process.wait(60) == 0, up.log()
        assert "leaked" not in up.log(), "a library of the engine was taken down"
    finally:
        up.stop()


@pytest.fixture(scope="package")
def ours(our_up: RunningUp) -> str:
    """The URL of Headrace."""
    url: str = our_up.state()["url"]
    return url


Request = TypeVar("Request")


def ask_all(ask: Callable[[Request], Any], requests: Iterable[Request]) -> Iterator[dict[Request, Future[Any]]]:
    """`ask(request)` for every request, so many at once as two engines have places: a step costs hardly more than for one.

    Each result, or what was raised instead, is for the test that looks at it.
    """
    with ThreadPoolExecutor(2 * PLACES) as pool:
        try:
            yield {request: pool.submit(ask, request) for request in requests}
        finally:
            pool.shutdown(cancel_futures=True)
