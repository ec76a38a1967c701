"""The peers as data: what is installed for each, what is started, and what it stands before."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headrace.tools.peer_bench.mock_back_end import MODEL

HEADRACE = "headrace"
TORCH = ("torch==2.13.0+cpu", "torch")  # the first that can be had


@dataclass(frozen=True, slots=True)
class Places:
    """The places of a peer: its folder, the ports it may take, and a model's folder with a tokenizer and a chat template."""

    folder: Path
    python: Path
    port: int
    back_end_port: int
    metrics_port: int
    model: Path | None = None

    @property
    def programs(self) -> Path:
        """Return the folder of its environment's programs."""
        return self.python.parent


@dataclass(frozen=True, slots=True)
class Launch:
    """Processes of a peer, in the order of their start. `files` are written into its folder before."""

    commands: tuple[tuple[str, ...], ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Peer:
    """A server to compare with. `packages`: steps of pip, of each the first choice that works.

    `stands_before`: what it passes requests to, "mock" or "" if it has engines of its own. `wants_nats`, `wants_model`: what it
    must be given.
    """

    name: str
    about: str
    packages: tuple[tuple[tuple[str, ...], ...], ...]
    stands_before: str = "mock"
    wants_nats: bool = False
    wants_model: bool = False
    version: str = ""

    def launch(self, places: Places) -> Launch:
        """Return what is started."""
        return _LAUNCHES[self.name](places)


def _litellm(places: Places) -> Launch:
    params = {"model": f"openai/{MODEL}", "api_base": f"http://127.0.0.1:{places.back_end_port}/v1", "api_key": "none"}
    open_to_all = {"dangerously_permit_weak_or_unset_master_key": True}  # as Headrace without keys: both judge no caller
    config = {"model_list": [{"model_name": MODEL, "litellm_params": params}], "litellm_settings": {"telemetry": False}}
    config |= {"general_settings": open_to_all}
    command = (str(places.programs / "litellm"), "--config", "config.yaml", "--host", "127.0.0.1", "--port", str(places.port))
    environment = {"LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False"}
    return Launch((command,), environment, {"config.yaml": json.dumps(config)})  # JSON is YAML


def _rust_router(program: tuple[str, ...], places: Places, level: str) -> Launch:
    command = (str(places.programs / program[0]), *program[1:], "--host", "127.0.0.1", "--port", str(places.port))
    command += ("--worker-urls", f"http://127.0.0.1:{places.back_end_port}", "--policy", "round_robin", "--log-level", level)
    command += ("--prometheus-port", str(places.metrics_port))
    return Launch((command,))


def _vllm_router(places: Places) -> Launch:
    return _rust_router(("vllm-router",), places, "warning")


def _smg(places: Places) -> Launch:
    return _rust_router(("smg", "launch"), places, "warn")


def _dynamo(places: Places) -> Launch:
    (planes := ["--discovery-backend", "file", "--request-plane", "tcp"]).extend(("--event-plane", "nats"))
    python = str(places.python)
    frontend = (python, "-m", "dynamo.frontend", *planes, "--router-mode", "kv", "--http-port", str(places.port))
    mocker = (python, "-m", "dynamo.mocker", *planes, "--model-path", str(places.model), "--model-name", MODEL)
    mocker += ("--num-workers", "4", "--speedup-ratio", "1000", "--block-size", "64")
    environment = {
        "NATS_SERVER": f"nats://127.0.0.1:{places.back_end_port}",
        "DYN_FILE_KV": str(places.folder / "kv"),
        "DYN_LOG": "warn",
    }
    return Launch((frontend, mocker), environment)


_LAUNCHES = {"litellm": _litellm, "vllm-router": _vllm_router, "smg": _smg, "dynamo": _dynamo}

PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "dynamo",
            "NVIDIA Dynamo, router mode kv, requests over TCP, events over NATS, its mocker with four workers",
            (
                (("--no-deps", "ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1"),),
                tuple((torch,) for torch in TORCH),
                (
                    (
                        *("transformers", "pydantic<=2.13.5", "uvloop", "aiohttp", "certifi", "msgspec", "prometheus-client"),
                        *("pyzmq", "tqdm", "zstandard", "kubernetes<33", "redis"),
                    ),
                ),
            ),
            stands_before="",
            wants_nats=True,
            wants_model=True,
            version="1.6.1",
        ),
        Peer(
            "litellm",
            "LiteLLM's proxy, one process, before the mock back end",
            ((("litellm[proxy]==1.110.2",),),),
            version="1.110.2",
        ),
        Peer(
            "vllm-router",
            "vllm-router, round_robin, before the mock back end",
            ((("vllm-router==0.1.17",),),),
            version="0.1.17",
        ),
        Peer("smg", "Shepherd Model Gateway, round_robin, before the mock back end", ((("smg==1.13.0",),),), version="1.13.0"),
    )
}


def mock_command(port: int) -> tuple[str, ...]:
    """Return what starts the mock back end."""
    return (sys.executable, "-m", "headrace.tools.peer_bench.mock_back_end", str(port))


def headrace_command(port: int, data_dir: Path, routers: int) -> tuple[str, ...]:
    """Return what starts Headrace: one frontend, so many routers, one worker with the simulator."""
    program = Path(sys.executable).with_name("headrace")
    command = (str(program), "up", "--engine", "sim", "--workers", "1", "--routers", str(routers), "--no-console")
    return (*command, "--port", str(port), "--data-dir", str(data_dir), "--log-level", "warning")
