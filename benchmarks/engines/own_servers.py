"""Starts an engine's own OpenAI server with the settings that Headrace gives to the engine.

    .venv/bin/python -m benchmarks.engines.own_servers sglang --model FOLDER --port 8001 --engine-arg dtype=bfloat16

It has none of what a worker of Headrace adds: no KV events, no second process for HTTP.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.workers.engine import EngineConfig

if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":  # one of SGLang's processes, which import this main module again
    from headrace.workers.sglang.cpu_plugin import stand_in

    stand_in()

ENGINES = ("vllm", "sglang")
START_S = 300.0
STOP_S = 20.0


@contextmanager
def own_server(engine: str, model: str, port: int, arguments: Sequence[str], log: Path) -> Iterator[int]:
    """Yield the process id of a server that answers. Raises SystemExit with the end of its log if it does not start."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.engines.own_servers",
        engine,
        "--model",
        model,
        "--port",
        str(port),
        *arguments,
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        _wait(process, f"http://127.0.0.1:{port}/health", log)
        yield process.pid
    finally:
        for kind in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, kind)
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise SystemExit(f"the engine's own server did not start\n{log.read_text()[-3000:]}")


def _run_vllm(config: EngineConfig, port: int) -> None:
    from headrace.workers.vllm import settings

    settings.prepare_environment(config, os.environ)
    from vllm.platforms import current_platform

    given: dict[str, Any] = {"served_model_name": config.served_name, "seed": config.seed, "enable_prefix_caching": True}
    if current_platform.is_cpu():
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        given |= {
            "block_size": settings.CPU_BLOCK_SIZE,
            "max_num_seqs": settings.CPU_MAX_SEQUENCES,
            "enforce_eager": True,
            "kv_cache_memory_bytes": settings.CPU_KV_BYTES,
        }
    given |= config.args
    quiet = ["--disable-log-stats", "--uvicorn-log-level", "warning"]
    sys.argv = ["api_server", "--host", "127.0.0.1", "--port", str(port), "--model", config.model, *quiet, *flags(given)]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


def flags(given: Mapping[str, Any]) -> list[str]:
    """Translate settings of the engine to flags of its server."""
    found: list[str] = []
    for name, value in given.items():
        if value is True:
            found.append(f"--{name.replace('_', '-')}")
        elif value is False:
            found.append(f"--no-{name.replace('_', '-')}")
        else:
            found += [f"--{name.replace('_', '-')}", value if isinstance(value, str) else json.dumps(value)]
    return found


def _run_sglang(config: EngineConfig, port: int) -> None:
    import torch

    from headrace.workers.engine_settings import json_as_text
    from headrace.workers.sglang import settings
    from headrace.workers.sglang.cpu_plugin import stand_in
    from headrace.workers.sglang.settings import sglang_settings

    config = replace(config, args=json_as_text(config.args, sglang_settings()))
    cpu = settings.computes_on_cpu(config.args, gpu=torch.cuda.is_available())
    settings.prepare_environment(config, os.environ, cpu=cpu)
    if cpu:
        stand_in()
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import ServerArgs

    given = settings.server_args(config, cpu=cpu) | {"host": "127.0.0.1", "port": port}
    launch_server(ServerArgs(**given | {"incremental_streaming_output": False}))


def main() -> None:
    """Be the server of one engine until a signal ends it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--model", required=True, help="a folder")
    parser.add_argument("--served-name", default="small")
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--engine-arg", action="append", default=[], metavar="NAME=VALUE", help="of the engine, as of a worker")
    options = parser.parse_args()
    pairs = (arg.partition("=") for arg in options.engine_arg)
    args = {name: _value(value) for name, _, value in pairs}
    config = EngineConfig(model=options.model, served_name=options.served_name, args=args)
    (_run_vllm if options.engine == "vllm" else _run_sglang)(config, options.port)


def _value(text: str) -> Any:
    with suppress(json.JSONDecodeError):
        return json.loads(text)
    return text


if __name__ == "__main__":
    main()
