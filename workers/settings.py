"""Declares the settings of one worker process."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from headrace.base.setting import Setting, check_numbers, port_setting
from headrace.workers.adapter_source import allows
from headrace.workers.errors import ModelSourceRefused

# Says where a model comes from, and checks that against what the operator allows.
#
# A model is a folder or file of the machine, an id of a hub (`org/name`), or an address (`s3://…`) whose scheme is its kind.
# The same holds for all else that an engine's settings name and that it loads: tokenizers, draft models, their
# configurations.

SOURCE_KINDS = ("folder", "hf", "s3", "gs", "az", "https", "http")

_PLACE = re.compile(r"/.*|[a-z][a-z0-9+.-]*://.+", re.DOTALL)
_PATH_STARTS = ("/", "./", "../", "~")
# Names under which vLLM, SGLang and TensorRT-LLM take something to load, also inside of a map such as `speculative_config`.
_LOADED = frozenset(
    {
        "draft_model",
        "hf_config_path",
        "model",
        "model_path",
        "model_weights",
        "speculative_draft_model_path",
        "speculative_model",
        "speculative_model_dir",
        "tokenizer",
        "tokenizer_path",
    }
)
_METHODS = frozenset({"ngram", "[ngram]"})  # vLLM takes them as draft models and loads nothing


def check_rules(rules: Sequence[str]) -> None:
    """Raise ValueError naming the first rule that is neither a kind of source nor a place."""
    for rule in rules:
        if rule not in SOURCE_KINDS and not _PLACE.fullmatch(rule):
            raise ValueError(
                f"model_sources: {rule!r} is neither a kind ({', '.join(SOURCE_KINDS)}) nor a place (/models, hf://org)"
            )


def check_model_source(model: str, rules: Sequence[str]) -> None:
    """Raise ModelSourceRefused for a model from elsewhere than the rules say."""
    kind, address = _source(model)
    if not any(allows(rule, kind, address) for rule in rules):
        allowed = ", ".join(rules) or "nothing"
        raise ModelSourceRefused(f"models from {address} are not allowed here; worker.model_sources allows: {allowed}")


def check_loaded_sources(args: Mapping[str, Any], rules: Sequence[str]) -> None:
    """Raise ModelSourceRefused for an engine's settings that would load something from elsewhere, and name the setting."""
    for name, place in _loaded(args):
        try:
            check_model_source(place, rules)
        except ModelSourceRefused as error:
            raise ModelSourceRefused(f"{name}: {error}") from None


def _source(model: str) -> tuple[str, str]:
    """Return the kind and the address of a model, as rules name them: without query, fragment and the file type of GGUF."""
    scheme, found, rest = model.partition("://")
    if found:
        path = re.split(r"[?#]", rest, maxsplit=1)[0]
        # an address that climbs is below no place
        return scheme.lower(), f"{scheme.lower()}://{'' if '..' in path.split('/') else path}"
    path = Path(model).expanduser()
    if model.startswith(_PATH_STARTS) or path.exists():
        return "folder", str(path.resolve())
    return "hf", f"hf://{model.partition(':')[0]}"


def _loaded(args: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, str]]:
    for name, value in args.items():
        if isinstance(value, Mapping):
            yield from _loaded(value, f"{within}{name}.")
        elif str(name).replace("-", "_") in _LOADED and isinstance(value, str) and value and value not in _METHODS:
            yield f"{within}{name}", value


MOST_LABEL = 64  # characters

SAMPLING = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "stop_token_ids"}
)
"""Sampling parameters that can have a default of the model's own."""

KINDS = ("chat", "completion", "embedding", "score", "classify", "image", "video")
EngineName = Literal["vllm", "sglang", "sim", "trtllm", "diffusion"]
RoleName = Literal["aggregated", "prefill", "decode", "encode"]
PrefillMode = Literal["auto", "always", "never"]
Unready = Literal["local", "refuse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Settings of one worker and its engine. Durations in seconds. Raises ValueError naming the setting and its value."""

    engine: Annotated[
        EngineName | str,
        Setting(
            "Engine: vLLM, SGLang, the simulator (no model needed), TensorRT-LLM, pictures and videos by "
            "diffusers, or a class of your own.",
            "--engine",
            other="MODULE:CLASS",
        ),
    ] = "vllm"
    model: Annotated[
        str,
        Setting(
            "Hugging Face id or folder of the model. Default for vllm and sglang: the bundled small chat model.",
            "--model",
            metavar="M",
        ),
    ]
    served_name: Annotated[
        str | None,
        Setting("Model name that clients use. Default: the model's own name.", "--served-name", metavar="NAME"),
    ] = None
    # Of the pool's card. The worker that starts last decides them.
    aliases: Annotated[
        Sequence[str],
        Setting("Further client names of the model, separated by commas.", "--aliases", metavar="NAME"),
    ] = ()
    default_sampling: Annotated[
        Mapping[str, Any],
        Setting(
            "Sampling defaults of requests, over the model's own: temperature=0.6. Repeatable.",
            "--default-sampling",
            metavar="KEY=VALUE",
        ),
    ] = field(default_factory=dict)
    default_max_tokens: Annotated[
        int | None,
        Setting(
            "Default length of chat answers. Default: as much as fits.",
            "--default-max-tokens",
            least=1,
            metavar="N",
        ),
    ] = None
    template_kwargs: Annotated[
        Mapping[str, Any],
        Setting(
            "Arguments of the chat template for every request, such as enable_thinking=false. Repeatable.",
            "--template-kwarg",
            metavar="KEY=VALUE",
        ),
    ] = field(default_factory=dict)  # a request may override them
    card_key: Annotated[
        str | None,
        Setting(
            "File with the key that signs the worker's model card, at least 32 bytes. Frontends have the same.", kind="path"
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        Setting(
            "File with a chat template instead of the model's. It is tried at the start.",
            "--chat-template",
            kind="path",
            metavar="FILE",
        ),
    ] = None
    endpoints: Annotated[
        Sequence[str],
        Setting(
            "Allowed uses of the model, separated by commas: chat, completion, embedding, score, classify. "
            "Default: all of its engine.",
            "--endpoints",
            metavar="KIND",
        ),
    ] = ()
    role: Annotated[
        RoleName,
        Setting(
            "Role: answer requests (aggregated), answer them with prompts computed elsewhere (decode), compute "
            "prompts (prefill), or encode media for workers with `encoders=true` (encode). `up` sets it.",
            "--role",
            commands=("worker",),
        ),
    ] = "aggregated"
    worker_name: Annotated[
        str | None,
        Setting(
            "Name of this worker in logs, metrics and `worker drain`. Default: generated.",
            "--name",
            metavar="ID",
            key="name",
            commands=("worker",),
        ),
    ] = None  # the process start is appended to it
    engine_args: Annotated[
        Mapping[str, Any],
        Setting(
            "Setting of the engine, passed unchanged and parsed as JSON if possible. Repeatable.",
            "--engine-arg",
            metavar="KEY=VALUE",
        ),
    ] = field(default_factory=dict)
    tool_parser: Annotated[
        str,
        Setting(
            "Parser of tool calls: one of the engine, by chat template and model family (auto), or none. A wrong "
            "name stops the start with a list.",
            "--tool-parser",
            metavar="NAME",
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        Setting(
            "Parser of reasoning: one of the engine, auto or none.",
            "--reasoning-parser",
            metavar="NAME",
        ),
    ] = "auto"
    drain_grace_s: Annotated[
        float,
        Setting("Time to finish or migrate work after SIGTERM.", "--drain-grace", least=0, most=86400, commands=("worker",)),
    ] = 60.0
    metrics_port: Annotated[
        int | None,
        port_setting(
            "Port for /live, /ready, /health and /metrics of the worker; 0 picks a free one (`up`: of the first, "
            "the next count up). Default: none; under `up` 0; with a metrics address 9100.",
            "--metrics-port",
        ),
    ] = None
    metrics_host: Annotated[str, Setting("Address of that port; 0.0.0.0 is every address.", "--metrics-host")] = "127.0.0.1"
    peer_host: Annotated[
        str | None,
        Setting(
            "Address at which other workers' engines reach this one to fetch KV blocks. Default: the address "
            "towards the NATS server.",
            "--peer-host",
            metavar="ADDRESS",
        ),
    ] = None
    start_timeout_s: Annotated[
        float, Setting("Longest wait for the engine to load its model.", "--start-timeout", least=0.1)
    ] = 900.0  # a large model takes minutes
    stall_s: Annotated[
        float,
        Setting(
            "Time without a report after which a busy engine counts as dead, until its steps give a better limit.",
            "--stall",
            least=0.1,
        ),
    ] = 120.0
    first_token_s: Annotated[
        float,
        Setting("Time without a first token after which a request is tried elsewhere.", least=0.1),
    ] = 300.0
    token_s: Annotated[
        float,
        Setting("Time without a next token, while others get theirs, after which a request is tried elsewhere.", least=0.1),
    ] = 120.0
    canary_s: Annotated[
        float,
        Setting("Idle time after which an engine gets a test request of one token; 0: never.", least=0),
    ] = 30.0
    canary_timeout_s: Annotated[float, Setting("Time to answer it before the engine counts as dead.", least=0.1)] = 20.0
    separate_frames: Annotated[bool, Setting("Send token frames over a NATS connection of their own.")] = (
        False  # measured slower: docs/performance.md
    )
    labels: Annotated[
        Sequence[str],
        Setting(
            "Labels that requests can require or prefer, separated by commas: rack, kind of GPU.",
            "--labels",
            metavar="LABEL",
        ),
    ] = ()
    zone: Annotated[
        str,
        Setting(
            "Place of this worker's machine, for the cost of KV transfers; also the label zone=NAME. Default: unknown.",
            "--zone",
            metavar="NAME",
        ),
    ] = ""
    fleet: Annotated[
        str,
        Setting(
            "Worker group: workers of this model with the same engine, hardware, parallelism, context length and "
            "price. Routers choose groups by a request's targets.",
            "--fleet",
            metavar="NAME",
        ),
    ] = ""
    price: Annotated[
        float,
        Setting(
            "Cost of this worker per hour, in any unit common to the model's groups. Routers take the cheapest "
            "group that meets the targets.",
            "--price",
            least=0,
            most=1e9,
        ),
    ] = 0.0
    pool_block: Annotated[
        int,
        Setting(
            "Tokens per block of the pool, if this worker is its first; its engine's blocks are a multiple. 0: "
            "those of its engine.",
            "--pool-block",
            least=0,
            most=65_536,
        ),
    ] = 0
    # Of a decode worker, where no router has decided.
    prefill: Annotated[
        PrefillMode,
        Setting(
            "Where a decode worker's prompts are computed without a router's decision: by a prefill worker if "
            "long, always, or never.",
            "--prefill",
            commands=("worker",),
        ),
    ] = "auto"
    prefill_min_tokens: Annotated[
        int,
        Setting(
            "With auto: the decode worker computes prompts with fewer uncached tokens.",
            "--prefill-min-tokens",
            least=0,
            commands=("worker",),
        ),
    ] = 256
    prefill_unready: Annotated[
        Unready,
        Setting(
            "While no prefill worker is ready, a decode worker computes prompts itself (local) or refuses the request.",
            "--prefill-unready",
            commands=("worker",),
        ),
    ] = "local"
    # Of every transfer of KV blocks from a prefill worker.
    prefill_wait_s: Annotated[
        float,
        Setting(
            "Least time that a decode worker waits for a prefill worker before it computes the prompt itself.",
            "--prefill-wait",
            least=0.01,
            most=3600,
        ),
    ] = 2.0
    prefill_budget_tokens: Annotated[
        int,
        Setting("Prompt tokens that a prefill worker accepts at once; 0: two engine steps.", "--prefill-budget", least=0),
    ] = 0
    transfer_timeout_s: Annotated[
        float,
        Setting(
            "Longest time from a KV transfer to the first token before the decode worker computes the prompt itself.",
            "--transfer-timeout",
            least=0.1,
            most=3600,
        ),
    ] = 10.0
    encode_wait_s: Annotated[
        float,
        Setting(
            "Longest wait for encode workers before the request's own worker encodes.",
            "--encode-wait",
            least=0.01,
            most=3600,
        ),
    ] = 5.0
    encode_nixl_bytes: Annotated[
        int,
        Setting(
            "Least size of embeddings read over NIXL from an encode worker; smaller ones, or all with 0, use the object store.",
            "--encode-nixl-from",
            least=0,
            metavar="BYTES",
        ),
    ] = 256 * 1024
    model_sources: Annotated[
        Sequence[str],
        Setting(
            "Allowed sources of models, tokenizers and draft models, separated by commas: kinds (folder, hf, s3, "
            "…) or places with all below them (/models, hf://my-org, s3://bucket/path).",
            "--model-sources",
            metavar="SOURCE",
        ),
    ] = ("folder", "hf")
    adapter_sources: Annotated[
        Sequence[str],
        Setting(
            "Allowed sources of adapters, separated by commas: kinds (folder, store, hf, s3, https, http) or "
            "places with all below them (/adapters, hf://my-org, s3://bucket/path).",
            "--adapter-sources",
            metavar="SOURCE",
        ),
    ] = ("folder", "store")
    adapter_max_bytes: Annotated[int, Setting("Largest adapter to download.", least=1, metavar="BYTES")] = 2 * 1024**3
    adapter_cache: Annotated[
        str | None,
        Setting(
            "Folder for downloaded adapters, shared by the workers of a machine. Default: in the user's cache.", kind="path"
        ),
    ] = None
    adapter_cache_bytes: Annotated[
        int, Setting("Size above which its least recently used adapters are removed.", least=1, metavar="BYTES")
    ] = 50 * 1024**3
    adapter_slots: Annotated[
        int,
        Setting(
            "Most loaded adapters; for another one the least recently used is unloaded, unless permanent or in use.",
            "--adapter-slots",
            least=1,
            most=256,
            metavar="N",
        ),
    ] = 256
    namespace: str = "default"

    def __post_init__(self) -> None:
        for name, known in (("prefill", PrefillMode), ("prefill_unready", Unready)):
            if getattr(self, name) not in get_args(known):
                raise ValueError(f"{name} {getattr(self, name)!r} is none of {', '.join(get_args(known))}")
        check_numbers(self)
        if unknown := self.default_sampling.keys() - SAMPLING:
            raise ValueError(f"default_sampling {min(unknown)!r} is none of {', '.join(sorted(SAMPLING))}")
        for name, value in self.default_sampling.items():
            numbers = value if name == "stop_token_ids" and isinstance(value, Sequence) else (value,)
            if any(isinstance(number, bool | str) or not isinstance(number, int | float) for number in numbers):
                raise ValueError(f"default_sampling {name} must be a number, got {value!r}")
        for kind in self.endpoints:
            if kind not in KINDS:
                raise ValueError(f"endpoints {kind!r} is none of {', '.join(KINDS)}")
        if self.peer_host in ("", "0.0.0.0", "::"):  # a comparison
            raise ValueError(f"peer_host {self.peer_host!r} is no address that other machines could reach: name one")
        if any(rule not in ("folder", "hf") for rule in self.model_sources):
            check_rules(self.model_sources)
        if any(rule not in ("folder", "store") for rule in self.adapter_sources):  # what reads more takes longer to import
            from headrace.workers.adapter_source import AllowedSources

            AllowedSources(self.adapter_sources)
        if len(self.fleet) > MOST_LABEL or not self.fleet.isprintable() or self.fleet != self.fleet.strip():
            raise ValueError(f"fleet {self.fleet!r}: up to {MOST_LABEL} printable characters")
        for label in (*self.labels, *([f"zone={self.zone}"] if self.zone else [])):
            if not label.strip() or len(label) > MOST_LABEL or "," in label:
                raise ValueError(f"label {label!r}: 1 to {MOST_LABEL} characters, no comma")
