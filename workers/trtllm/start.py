"""Starts TensorRT-LLM: checks, settings, the blocking construction, a first request, and the description of the engine.

The number of KV blocks is known only when the engine runs, from its first KV event or its statistics; both come after a first
request, so one of one token is made here.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import structlog

from headrace.workers.blocking import run_in_thread
from headrace.workers.engine import EngineConfig, EngineInfo, Load, Role, several
from headrace.workers.errors import EngineStartFailed
from headrace.workers.kit import end_tokens, starting, summed
from headrace.workers.lora import Adapters, adapters_of
from headrace.workers.tokens import token_table
from headrace.workers.trtllm.contract import Installed, load_installed
from headrace.workers.trtllm.convert import Model
from headrace.workers.trtllm.kv_feed import KvFeeds
from headrace.workers.trtllm.settings import (
    LogitsProcessors,
    engine_args,
    handover_word,
    lease_s,
    prepare_environment,
    roles_of,
)

# Checks that an engine of several GPUs is started in the way that TensorRT-LLM needs.
#
# On one node it starts a process per GPU by itself. Over several nodes, `trtllm-llmapi-launch` starts one task per GPU by MPI
# or Slurm: the task of rank 0 runs the worker, with the variables below; all others run TensorRT-LLM's own processes and
# never become workers of Headrace.

SPAWNED = "TLLM_SPAWN_PROXY_PROCESS"
ADDRESS = "TLLM_SPAWN_PROXY_PROCESS_IPC_ADDR"
SIZE = "tllm_mpi_size"
LAUNCHER = "trtllm-llmapi-launch"
_RANKS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMI_ID")  # in the order in which the launcher reads them


def world_size(args: Mapping[str, Any]) -> int:
    """Return the number of GPUs, and so of processes, that these settings ask for."""
    size = 1
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"):
        size *= int(args.get(name) or 1)
    return size


def attention_ranks(args: Mapping[str, Any]) -> int:
    """Return the number of attention data-parallel ranks, each with a KV cache of its own."""
    return int(args.get("tensor_parallel_size") or 1) if args.get("enable_attention_dp") else 1


def shared_by(args: Mapping[str, Any]) -> dict[str, int]:
    """Return the ranks that share the model, by kind."""
    kinds = {"tensor": "tensor", "pipeline": "pipeline", "context": "context", "expert": "moe_expert"}
    return several(**{kind: int(args.get(f"{name}_parallel_size") or 1) for kind, name in kinds.items()})


def launch_command(world: int, *worker: str) -> tuple[str, ...]:
    """Return the command that starts a worker over several nodes by Slurm."""
    return ("srun", "--mpi=pmix", f"--ntasks={world}", LAUNCHER, "headrace", "worker", "--engine", "trtllm", *worker)


def check_launch(args: Mapping[str, Any], environ: Mapping[str, str], *, gpus: int | None) -> None:
    """Raise EngineStartFailed where this process cannot start the ranks that its settings ask for.

    `gpus`: those of this machine, None where that is not known.
    """
    world = world_size(args)
    if world == 1:
        return
    if environ.get(SPAWNED) == "1":
        tasks = environ.get(SIZE, "")
        if tasks.isdigit() and int(tasks) != world:
            raise EngineStartFailed(
                f"{LAUNCHER} runs {tasks} tasks, and these settings ask for {world} ranks "
                "(tensor × pipeline × context parallel)"
            )
        if not environ.get(ADDRESS):
            raise EngineStartFailed(f"{SPAWNED} is set and {ADDRESS} is not: start the worker by {LAUNCHER}")
        return
    rank = next((environ[name] for name in _RANKS if environ.get(name)), "0")
    if rank != "0":
        raise EngineStartFailed(
            f"this is task {rank} of an MPI job, and only rank 0 of an engine is a worker; start it so: "
            + " ".join(launch_command(world))
        )
    if gpus is not None and gpus < world:
        raise EngineStartFailed(
            f"these settings ask for {world} GPUs and this machine has {gpus}; over several machines start it so: "
            + " ".join(launch_command(world))
        )


# Makes load reports from the iteration statistics that TensorRT-LLM reports.
#
# A row is `{"numActiveRequests", "numQueuedRequests", "iterLatencyMS", "kvCacheStats": {"maxNumBlocks", "usedNumBlocks", …},
# "inflightBatchingStats": {"numCtxTokens", "numContextRequests", "numGenRequests", …}, "attentionDpRank"?}`; with attention
# data parallelism 1.3 makes one per rank, and 1.2 makes those of rank 0 alone, which are taken for the others too.
# `kvCacheStats` may be null.

FRESH_S = 1.0  # older statistics say nothing about what runs now


def rank_load(row: Mapping[str, Any]) -> Load:
    """Return the load of a rank as its last iteration left it."""
    cache = row.get("kvCacheStats") or {}
    batch = row.get("inflightBatchingStats") or {}
    return Load(
        running=int(row.get("numActiveRequests") or 0),
        waiting=int(row.get("numQueuedRequests") or 0),
        blocks_used=int(cache.get("usedNumBlocks") or 0),
        blocks_total=int(cache.get("maxNumBlocks") or 0),
        step_s=float(row.get("iterLatencyMS") or 0.0) / 1000,
        step_prefill_tokens=int(batch.get("numCtxTokens") or 0),
        step_decodes=int(batch.get("numGenRequests") or 0),
    )


class LoadMeter:
    """The last statistics of each rank, and the prompts that have no token yet."""

    def __init__(self, ranks: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._ranks = ranks
        self._clock = clock
        self._rows: dict[int, Load] = {}
        self._at = float("-inf")
        self._queue: dict[str, tuple[int | None, int]] = {}  # sequence without a token → its rank, prompt tokens to be computed
        self._queued: Counter[int | None] = Counter()  # these tokens by rank; None: the engine chooses the rank

    @property
    def blocks(self) -> int:
        """Return the blocks of all ranks, 0 while no statistics have told them."""
        return sum(row.blocks_total for row in self._rows.values())

    def note(self, rows: Iterable[Mapping[str, Any]]) -> None:
        for row in rows:
            number = row.get("attentionDpRank")
            self._rows |= dict.fromkeys(range(self._ranks) if number is None else (int(number),), rank_load(row))
            self._at = self._clock()

    def queued(self, sequence_id: str, tokens: int, *, rank: int | None = None) -> None:
        """Record a submitted sequence of which `tokens` are to be computed."""
        self._queue[sequence_id] = rank, max(0, tokens)
        self._queued[rank] += max(0, tokens)

    def gone(self, sequence_id: str) -> None:
        """Record that a sequence has its first token, or has ended."""
        rank, tokens = self._queue.pop(sequence_id, (None, 0))
        self._queued[rank] -= tokens

    def read(self, *, mine: int, blocks: int, slots: int) -> Load:
        """Return the load. `mine` is the number of sequences in the engine; the statistics of an idle one are stale."""
        each = blocks // self._ranks
        if mine == 0:
            return summed([Load(blocks_total=each)] * self._ranks, mine=0, blocks=blocks, queued=0)
        ranks = [self._rank(rank, each) for rank in range(self._ranks)]
        load = summed(ranks, mine=mine, blocks=blocks, queued=self._queued.total())
        if self._clock() - self._at <= FRESH_S:
            return load
        running = min(slots, mine)
        return msgspec.structs.replace(load, running=running, waiting=mine - running)

    def _rank(self, rank: int, blocks: int) -> Load:
        """Return the load of a rank by its last statistics. Prompts without a rank are shared out evenly."""
        queued = self._queued[rank] + self._queued[None] // self._ranks
        row = self._rows.get(rank, Load())
        return msgspec.structs.replace(row, blocks_total=blocks, queued_prefill_tokens=queued)


_LENGTHS = ("max_position_embeddings", "max_sequence_length", "n_positions", "seq_length", "model_max_length")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The facts that the files of a model tell."""

    folder: Path
    context_length: int | None
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    chat: bool  # there is a chat template
    default_sampling: dict[str, Any]


def local_folder(model: str) -> Path:
    """Return the model's folder; a Hugging Face id is downloaded first. Blocks. Raises EngineStartFailed."""
    folder = Path(model)
    if folder.is_dir():
        return folder
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model))
    except Exception as error:  # the hub's errors are many
        raise EngineStartFailed(f"the model {model!r} is no folder, and the hub did not give it: {error}") from error


def read_model(folder: Path) -> ModelFacts:
    """Read a model's configuration. Raises EngineStartFailed for a missing or damaged one."""
    config = _json(folder / "config.json", needed=True)
    if not (folder / "tokenizer.json").is_file():
        raise EngineStartFailed(f"{folder} has no tokenizer.json; Headrace needs a tokenizer in that form")
    inner = config.get("text_config")
    text: dict[str, Any] = inner if isinstance(inner, dict) else {}
    generation = _json(folder / "generation_config.json")
    vocab = config.get("vocab_size", text.get("vocab_size"))
    if not isinstance(vocab, int):
        raise EngineStartFailed(f"{folder / 'config.json'} has no vocab_size")
    lengths = [value for name in _LENGTHS for value in (config.get(name), text.get(name)) if isinstance(value, int)]
    tokenizer = _json(folder / "tokenizer_config.json")
    eos = end_tokens(generation.get("eos_token_id"), config.get("eos_token_id", text.get("eos_token_id")))
    return ModelFacts(
        folder=folder,
        context_length=lengths[0] if lengths else None,
        vocab_size=vocab,
        eos_token_ids=eos or end_tokens(_named_token(folder, tokenizer.get("eos_token"))),
        chat=(folder / "chat_template.jinja").is_file() or "chat_template" in tokenizer,
        default_sampling={
            name: generation[name]
            for name in ("temperature", "top_p", "top_k")
            if isinstance(generation.get(name), int | float)
        },
    )


def _json(path: Path, *, needed: bool = False) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        if needed:
            raise EngineStartFailed(f"cannot read {path}: {error.strerror}") from None
        return {}
    except ValueError as error:
        raise EngineStartFailed(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise EngineStartFailed(f"{path} is not an object")
    return found


def _named_token(folder: Path, name: Any) -> list[int]:
    text = name.get("content") if isinstance(name, dict) else name
    added = _json(folder / "tokenizer.json").get("added_tokens") or ()
    return [one["id"] for one in added if one.get("content") == text]


# Polls what TensorRT-LLM reports only when it is asked: KV events and statistics of its iterations.
#
# Its iterators end when nothing came for `timeout` seconds, and in 1.2 one that has ended stays so until the next request is
# submitted, or until `mark_undone` is called. Before the first request there is nothing to poll at all.

_log = structlog.get_logger()

WAIT_S = 0.005  # how long an iterator waits for the next item
BUSY_S = 0.01  # between two polls while they bring something, or while requests run
IDLE_S = 0.1  # between two polls of an engine without requests
MOST_AT_ONCE = 4096
_EMPTY = (asyncio.QueueEmpty, IndexError, TimeoutError)  # what versions raise in place of ending the iteration


async def poll_once(ask: Callable[..., Any], *, wait_s: float = WAIT_S) -> list[Mapping[str, Any]]:
    """Return the items that are there now. `ask` is a method of the engine that returns an async iterator."""
    found: list[Mapping[str, Any]] = []
    try:
        results = ask(timeout=wait_s)
    except AssertionError:  # nothing was submitted yet
        return found
    if (undone := getattr(results, "mark_undone", None)) is not None:
        undone()
    try:
        async for item in results:
            found += item if isinstance(item, list) else [item]
            if len(found) >= MOST_AT_ONCE:
                break
    except _EMPTY:
        return found
    return found


async def keep_polling(
    ask: Callable[..., Any], use: Callable[[list[Mapping[str, Any]]], None], busy: Callable[[], bool], *, what: str
) -> None:
    """Poll until cancelled and hand over what comes. A poll that fails is logged, and tried again later."""
    failures = 0
    while True:
        try:
            found = await poll_once(ask)
            failures = 0
        except Exception as error:  # the engine is dying, or its own queue is broken
            failures += 1
            if failures == 1:
                _log.warning("engine.poll_failed", engine="trtllm", what=what, error=repr(error))
            found = []
        if found:
            use([item for item in found if item])
        await asyncio.sleep(IDLE_S if failures or not (found or busy()) else BUSY_S)


FALLBACK_LENGTH = 4096  # of a model whose configuration says nothing
_TOLD_WITHIN_S = 10.0  # until the engine has told its number of blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A running engine, its description, and what the adapter needs to talk to it."""

    llm: Any
    info: EngineInfo
    installed: Installed
    model: Model
    adapters: Adapters
    roles: frozenset[Role]
    meter: LoadMeter
    feeds: KvFeeds | None  # with the KV events of the first request; None: it tells none


@dataclass(frozen=True, slots=True)
class _Built:
    llm: Any
    args: Mapping[str, Any]
    files: ModelFacts


async def start_trtllm(config: EngineConfig) -> Started:
    """Import TensorRT-LLM, load the model and serve a first request. Raises EngineStartFailed."""
    prepare_environment()
    known_adapters = adapters_of(config)
    processors = LogitsProcessors.of(config)
    installed = await run_in_thread(load_installed, name="trtllm-import")
    built = await run_in_thread(lambda: _build(config, installed), name="trtllm-start")
    try:
        lora = built.args.get("lora_config")
        adapters = Adapters(
            "TensorRT-LLM",
            known_adapters,
            room=None if lora is not None else "adapters or lora_config",
            most_rank=lora.max_lora_rank if lora is not None else None,
        )
        cache = built.args["kv_cache_config"]
        model = Model(
            api=installed.api,
            eos=built.files.eos_token_ids,
            vocab_size=built.files.vocab_size,
            token_bytes=token_table(str(built.files.folder)).token_bytes,
            processors=processors,
            ranks=attention_ranks(built.args),
            priority=installed.priority,
        )
        meter = LoadMeter(model.ranks)
        told = cache.enable_block_reuse and cache.event_buffer_max_size > 0
        feeds = KvFeeds(cache.tokens_per_block, adapters.names_by_number, ranks=model.ranks) if told else None
        events = await _first_request(built.llm, model, meter, told=told)
        blocks = _created(events, model.ranks) or meter.blocks or (cache.max_tokens or 0) // cache.tokens_per_block
        if not blocks:
            raise EngineStartFailed(
                f"TensorRT-LLM has not told its number of KV blocks within {_TOLD_WITHIN_S:g} s; "
                "give enable_iter_perf_stats=true, or max_tokens in kv_cache_config"
            )
        if feeds is not None:
            feeds.put(events)
        info = _describe(config, installed, built, blocks=blocks, adapters=adapters)
    except BaseException:
        await run_in_thread(built.llm.shutdown, name="trtllm-stop")
        raise
    return Started(
        llm=built.llm,
        info=info,
        installed=installed,
        model=model,
        adapters=adapters,
        roles=roles_of(built.args),
        meter=meter,
        feeds=feeds,
    )


def _build(config: EngineConfig, installed: Installed) -> _Built:
    from tensorrt_llm.llmapi.llm_args import TorchLlmArgs

    files = read_model(local_folder(config.model))
    args = engine_args(
        config,
        installed.api,
        known=frozenset(TorchLlmArgs.model_fields),
        max_seq_len=files.context_length or FALLBACK_LENGTH,
        adapters=adapters_of(config),
    )
    if config.role not in roles_of(args):
        able = ", ".join(sorted(roles_of(args)))
        raise EngineStartFailed(f"with these settings TensorRT-LLM can be {able}, not {config.role.value}")
    check_launch(args, os.environ, gpus=_gpus())
    with starting("TensorRT-LLM", config.model):
        return _Built(installed.api.LLM(model=str(files.folder), **args), args, files)


def _gpus() -> int | None:
    try:
        import torch
    except ImportError:
        return None
    return int(torch.cuda.device_count()) or None


async def _first_request(llm: Any, model: Model, meter: LoadMeter, *, told: bool) -> list[Mapping[str, Any]]:
    """Have the engine make one token; return the KV events of that. Statistics go to `meter`. Raises EngineStartFailed."""
    end = model.eos[0] if model.eos else 0
    params = model.api.SamplingParams(max_tokens=1, end_id=end, pad_id=end, ignore_eos=True, detokenize=False, temperature=0.0)
    events: list[Mapping[str, Any]] = []
    try:
        await llm.generate_async([end], params, streaming=True).aresult()
        async with asyncio.timeout(_TOLD_WITHIN_S):
            while not (meter.blocks and (events or not told)):
                meter.note(await poll_once(llm.get_stats_async))
                if told:
                    events += await poll_once(llm.get_kv_cache_events_async)
    except TimeoutError:
        return events
    except Exception as error:
        raise EngineStartFailed(f"TensorRT-LLM failed on its first request: {error}") from error
    return events


def _created(events: list[Mapping[str, Any]], ranks: int) -> int:
    """Return the blocks on the device of all ranks, from the events that announce the cache of the largest window.

    All ranks have as many, and the events of some may not have come yet.
    """
    announced = [event for event in events if event["data"]["type"] == "created"]
    caches = [(one.get("window_size") or 0, int(one["data"]["num_blocks_per_cache_level"][0])) for one in announced]
    return max(caches)[1] * ranks if caches else 0


def _describe(config: EngineConfig, installed: Installed, built: _Built, *, blocks: int, adapters: Adapters) -> EngineInfo:
    files, cache, settings = built.files, built.args["kv_cache_config"], built.llm.args
    ranks = attention_ranks(built.args)
    hands_over = handover_word(built.args, installed.line, cache.tokens_per_block)
    return EngineInfo(
        engine="trtllm",
        version=installed.version,
        tokenizer_dir=str(files.folder),
        context_length=int(built.args["max_seq_len"]),
        block_size=cache.tokens_per_block,
        blocks=blocks,
        slots=int(settings.max_batch_size) * ranks,
        vocab_size=files.vocab_size,
        eos_token_ids=files.eos_token_ids,
        kinds=("chat", "completion") if files.chat else ("completion",),
        step_tokens=int(settings.max_num_tokens or 0),
        adapters=adapters.names,
        handover=hands_over,
        lease_s=lease_s(built.args) if hands_over else 0.0,
        prefill_samples=bool(hands_over),
        ranks=ranks,
        parallel=shared_by(built.args),
        default_sampling=files.default_sampling,
        extra={"release_line": installed.line, "host_cache_bytes": cache.host_cache_size or 0},
    )
