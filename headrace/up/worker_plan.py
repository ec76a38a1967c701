"""Plans the workers of `headrace up`: number and role, command line and environment, and start order.

    --mode aggregated      worker-1 …                 each computes prompts and answers (--workers, one)
    --mode disagg          decode-1 … prefill-1 …     (--decode-workers, --prefill-workers, one each)
                           worker-1 … beside them     (--workers, none), which can take either role later
    --encode-workers N     encode-1 … beside those    which encode images for them

Each further pool (`--pool NAME=…`) has its own: NAME-worker-1 …, on an engine of its own.

Engines on the CPU share its cores.  Each gets its part of the threads, and where there are fewer than two cores for each, the
first worker that answers requests starts alone: engines that load at once slow each other down, and the first answer with them.
A plan is data: nothing is started here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import structlog

from headrace.base.errors import CommandError, SettingsError
from headrace.config.build_settings import MODEL_ENGINES
from headrace.config.options import declared_by, find
from headrace.config.settings import Settings
from headrace.config.values import as_text
from headrace.router.placement.settings import SchedulerSettings
from headrace.up.server_logins import every_pool

# Role → the first part of the names of its workers; in the order in which they are listed and their metrics ports are assigned.
_NAMES = {"aggregated": "worker", "decode": "decode", "prefill": "prefill", "encode": "encode"}
_START_CORES = 2  # that an engine keeps busy while it loads
# What has an engine that starts aggregated hand blocks over, so that it can take any role later; and what says that already.
_HANDS_OVER = {
    "vllm": ("kv_transfer_mode=push", frozenset({"kv_transfer_mode", "kv_transfer_config"})),
    "sim": ("disagg=params", frozenset({"disagg"})),
}
# What has an engine take embeddings of media that others have encoded; and the roles in which it can.
_TAKES_EMBEDDINGS = {"vllm": ("encoders", frozenset({"aggregated", "decode"}))}
Login = Callable[[Settings], Mapping[str, str]]

SIM_OUTPUT_TOKENS = 192  # mean length of the simulator's answers where nothing says another one; else they fill the context


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """A worker to run. `waits`: it starts when the first worker of the plan can answer, or has failed to."""

    name: str
    role: str
    engine: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    waits: bool = False

    @property
    def serves(self) -> bool:
        """Return True for a worker that answers requests. The roles `prefill` and `encode` only compute for others."""
        return self.role not in ("prefill", "encode")


def worker_counts(settings: Settings) -> dict[str, int]:
    """Return role → number of workers.

    Raises SettingsError for numbers that the mode has no use for, and when what moves KV blocks is not installed.
    """
    asked = {"prefill": "up.prefill_workers", "decode": "up.decode_workers"}
    disagg = settings["up.mode"] == "disagg"
    if not disagg:
        for key in asked.values():
            if settings[key]:
                raise SettingsError(f"{key} = {settings[key]} ({settings.source(key)}): only with --mode disagg")
    default = 1 if disagg else 0
    counts = {role: default if settings[key] is None else int(settings[key]) for role, key in asked.items()}
    aggregated = settings["up.workers"]
    counts["aggregated"] = (0 if disagg else 1) if aggregated is None else int(aggregated)
    counts["encode"] = int(settings["up.encode_workers"])
    if counts["encode"] and settings["worker.engine"] not in _TAKES_EMBEDDINGS:
        raise SettingsError(
            f"up.encode_workers = {counts['encode']} ({settings.source('up.encode_workers')}): only with --engine "
            f"{' or '.join(_TAKES_EMBEDDINGS)}, not with {settings['worker.engine']}"
        )
    if counts["prefill"] + counts["decode"] and find_spec("nixl") is None:
        raise SettingsError(
            f"up.mode = 'disagg' ({settings.source('up.mode')}): KV blocks move over NIXL, and the package nixl is not "
            "installed; `make install MODE=disagg` installs it"
        )
    return counts


def plan_workers(
    settings: Settings, environment: Mapping[str, str], *, cores: int, login: Login = lambda _pool: {}
) -> list[WorkerPlan]:
    """Return the workers to run, first one that answers requests. All get `environment`, to which more is added.

    `login` returns the variables that give the workers of a pool their login at the NATS server.

    Raises SettingsError as `worker_counts` does, and for pools that make no sense.
    """
    pools = list(every_pool(settings))
    environment = {**environment, "HEADRACE_WORKER_DRAIN_GRACE_S": str(settings["up.grace_s"])}
    engines = sum(sum(worker_counts(pool).values()) for _, pool in pools if pool["worker.engine"] in MODEL_ENGINES)
    if engines > 1:
        # Engines on the CPU take a thread per core each; together that is slower by an order of magnitude.
        environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // engines)))
    plans = [plan for name, pool in pools for plan in _of_pool(name, pool, {**environment, **login(pool)})]
    _check_names(plans)
    plans.sort(key=lambda plan: not plan.serves)
    if engines > 1 and cores < _START_CORES * engines and any(plan.serves for plan in plans):
        return [plans[0], *(replace(plan, waits=plan.engine in MODEL_ENGINES) for plan in plans[1:])]
    return plans


def _of_pool(pool: str, settings: Settings, environment: Mapping[str, str]) -> Iterator[WorkerPlan]:
    """Yield the workers of one pool; the name of the first one is empty."""
    counts = worker_counts(settings)
    environment = {**_transfers(settings), **environment, **_decision(settings)}
    for role in _NAMES:
        for number in range(1, counts[role] + 1):
            yield _worker(pool, settings, environment, role, number)


def _worker(pool: str, settings: Settings, environment: Mapping[str, str], role: str, number: int) -> WorkerPlan:
    name, engine = _name(pool, role, number), settings["worker.engine"]
    argv = ["worker", *(["--pool", pool] if pool else []), "--engine", engine, "--role", role, "--name", name]
    if settings["worker.model"]:
        argv += ["--model", settings["worker.model"]]
    argv += [*_elastic(settings, role), *_embeddings(settings, role), *_lengths(settings)]
    return WorkerPlan(name=name, role=role, engine=engine, argv=tuple(argv), env=environment)


def _name(pool: str, role: str, number: int) -> str:
    return f"{_slug(pool)}-{_NAMES[role]}-{number}" if pool else f"{_NAMES[role]}-{number}"


def plan_worker(
    settings: Settings, environment: Mapping[str, str], *, model: str, role: str, taken: Collection[str], login: Login
) -> WorkerPlan:
    """Return one more worker of a role, under a name that is free. `model`: the name that clients use.

    Raises SettingsError for a role or model of which no worker can be started here.
    """
    pools = list(every_pool(settings))
    if role not in _NAMES:
        raise SettingsError(f"{role!r} is no role of a worker")
    if role in ("prefill", "decode") and settings["up.mode"] != "disagg":
        raise SettingsError(f"this deployment has no {role} workers: it was not started with --mode disagg")
    found = [one for one in pools if model in (one[0], one[1]["worker.served_name"])] or (pools if len(pools) == 1 else [])
    if len(found) != 1:
        raise SettingsError(f"{len(found)} pools of this deployment serve {model!r}")
    name, pool = found[0]
    environment = {**environment, "HEADRACE_WORKER_DRAIN_GRACE_S": str(settings["up.grace_s"]), **login(pool)}
    environment = {**_transfers(pool), **environment, **_decision(pool)}
    number = next(n for n in count(1) if _name(name, role, n) not in taken)
    return _worker(name, pool, environment, role, number)


def _slug(pool: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]+", "-", pool).strip("-") or "pool"


def _check_names(plans: list[WorkerPlan]) -> None:
    names = [plan.name for plan in plans]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise SettingsError(f"up.pools: two pools would have workers of the name {twice}; their names are too much alike")


def _elastic(settings: Settings, role: str) -> list[str]:
    if settings["up.mode"] != "disagg" or role != "aggregated":
        return []
    argument, said_by = _HANDS_OVER.get(settings["worker.engine"], ("", frozenset()))
    if not argument:
        return []  # an engine of the user's own: its arguments are its own, too
    return [] if said_by & settings["worker.engine_args"].keys() else ["--engine-arg", argument]


def _embeddings(settings: Settings, role: str) -> list[str]:
    if not settings["up.encode_workers"]:
        return []
    argument, roles = _TAKES_EMBEDDINGS[settings["worker.engine"]]
    return ["--engine-arg", f"{argument}=true"] if role in roles and argument not in settings["worker.engine_args"] else []


def _lengths(settings: Settings) -> list[str]:
    """Return the arguments that end the simulator's answers. By default, for tests and measurements, they do not end."""
    given = settings["worker.engine_args"]
    if settings["worker.engine"] != "sim" or {"mean_output_tokens", "tokenizer_dir"} & given.keys():
        return []  # a tokenizer of the user's own may have no end token
    return ["--engine-arg", f"mean_output_tokens={SIM_OUTPUT_TOKENS}"]


def _transfers(settings: Settings) -> dict[str, str]:
    """Return the variable that has UCX listen on loopback only, where all workers are on this machine.

    They are where the embedded NATS server takes no others. Without it UCX opens sockets, which ask for no login, on every
    address of the machine. Shared memory and links between GPUs are no network devices for UCX, so they stay in use.
    """
    if settings["up.mode"] != "disagg" and not settings["up.encode_workers"]:
        return {}
    if settings["worker.peer_host"] or settings["nats.url"] or settings["nats.context"]:
        return {}
    from headrace.frontend.auth.caller import is_loopback

    return {"UCX_NET_DEVICES": "lo"} if is_loopback(settings["server.host"]) else {}


def _decision(settings: Settings) -> dict[str, str]:
    """Return the variables that give workers what was set for the router's decisions and that workers decide too.

    Where prompts are computed is one question, whether a router answers it or, while there is none, a decode worker.
    """
    variables = {}
    for deciding in declared_by(SchedulerSettings, "router"):
        own = find(f"worker.{deciding.field}")
        if own is None or not settings.given(deciding.key) or settings.given(own.key):
            continue
        value = settings[deciding.key]
        if not own.choices or value in own.choices:
            variables[own.env] = as_text(own, value)
    return variables


# Finds the interpreter that runs the workers of an engine: this one, or one of an environment beside it.
#
# Engines want different versions of the same packages. `make install ENGINE=sglang` on a machine with a GPU makes
# `.venv-sglang` beside `.venv`; workers of SGLang then run there, whatever runs in `.venv`.

PACKAGES = {"sglang": "sglang"}
"""The package that an engine needs, for engines that may have an environment of their own."""


def beside(prefix: str, engine: str) -> Path:
    """Return where the interpreter of an engine's own environment is, given this environment's folder."""
    return Path(f"{prefix.rstrip('/')}-{engine}") / "bin" / "python"


def worker_python(engine: str, *, prefix: str = sys.prefix) -> str:
    """Return the interpreter for the workers of an engine. Raises SettingsError where the engine is installed in none."""
    package = PACKAGES.get(engine)
    if package is None or find_spec(package) is not None:
        return sys.executable
    own = beside(prefix, engine)
    if os.access(own, os.X_OK):
        return str(own)
    raise SettingsError(
        f"worker.engine = {engine!r}: the package {package} is not installed here, and there is no {own}; "
        f"`make install ENGINE={engine}` installs it"
    )


# Lets a planner on the same machine ask the running `headrace up` for one more worker, over a socket in the run folder.
#
# One line of JSON each way: {"start": "aggregated", "model": "name"} → {"worker": "worker-3"} or {"error": "…"}. Only the
# user who runs `up` can open the socket. Workers leave by a drain over NATS, like any other: the supervisor needs no command
# for that.

_log = structlog.get_logger()

Start = Callable[[str, str], str]
"""Starts a worker of a model in a role and returns its name. Raises CommandError."""

_ANSWER_S = 10.0
_LONGEST = 4096  # bytes of a line


def socket_of(data_dir: Path) -> Path:
    return data_dir / "run" / "up.sock"


@contextlib.asynccontextmanager
async def worker_control(path: Path, start: Start) -> AsyncIterator[None]:
    """Answer at the socket while open. Where it cannot be opened, `up` runs without, and says so."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                told = _answer(await reader.readline(), start)
                writer.write(json.dumps(told).encode() + b"\n")
                await writer.drain()
        except (OSError, TimeoutError, ValueError):
            pass  # the asker has left
        finally:
            writer.close()

    _remove(path)  # of an `up` that was killed
    try:
        server = await asyncio.start_unix_server(answer, path, limit=_LONGEST)
    except OSError as error:  # its path is too long, or the file system has none
        _log.warning("up.no_worker_control", path=str(path), error=str(error))
        yield
        return
    os.chmod(path, 0o600)
    try:
        yield
    finally:
        server.close()
        _remove(path)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def _answer(line: bytes, start: Start) -> dict[str, str]:
    try:
        asked = json.loads(line)
        return {"worker": start(str(asked["model"]), str(asked["start"]))}
    except (CommandError, SettingsError) as error:
        return {"error": str(error)}
    except (ValueError, KeyError, TypeError):
        return {"error": "that is no command of this version"}


async def ask_for_worker(path: str, *, model: str, role: str) -> str:
    """Ask for one more worker and return its name. Raises CommandError."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                writer.write(json.dumps({"start": role, "model": model}).encode() + b"\n")
                await writer.drain()
                told = json.loads(await reader.readline())
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError) as error:
        raise CommandError(f"the `headrace up` at {path} does not answer: {error}") from error
    if "error" in told:
        raise CommandError(told["error"])
    return str(told["worker"])
