"""Declares the settings of one worker process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from headrace.base.setting import Setting, check_numbers, port_setting

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
            "Engine to run: vLLM, SGLang, the simulator (no model needed), TensorRT-LLM, pictures and videos by "
            "diffusers, or a class of your own.",
            "--engine",
            other="MODULE:CLASS",
        ),
    ] = "vllm"
    model: Annotated[
        str,
        Setting(
            "Hugging Face id or folder of the model. vllm and sglang without it: the bundled small chat model.",
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
        Setting("More names that clients may use for the model, separated by commas.", "--aliases", metavar="NAME"),
    ] = ()
    default_sampling: Annotated[
        Mapping[str, Any],
        Setting(
            "How to sample where a request does not say, over the model's own defaults: temperature=0.6. Repeatable.",
            "--default-sampling",
            metavar="KEY=VALUE",
        ),
    ] = field(default_factory=dict)
    default_max_tokens: Annotated[
        int | None,
        Setting(
            "Length of chat answers where a request does not say. Default: what fits.",
            "--default-max-tokens",
            least=1,
            metavar="N",
        ),
    ] = None
    template_kwargs: Annotated[
        Mapping[str, Any],
        Setting(
            "What the chat template is given with every request, for example enable_thinking=false. Repeatable.",
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
            "File with a chat template in place of the model's own. It is tried at the start.",
            "--chat-template",
            kind="path",
            metavar="FILE",
        ),
    ] = None
    endpoints: Annotated[
        Sequence[str],
        Setting(
            "What clients may use the model for, separated by commas: chat, completion, embedding, score, classify. Default: "
            "all that its engine serves.",
            "--endpoints",
            metavar="KIND",
        ),
    ] = ()
    role: Annotated[
        RoleName,
        Setting(
            "What the worker does: answer requests (aggregated), answer them and let others compute their prompts (decode), "
            "compute prompts for decode workers (prefill), or run the encoder of images, videos and sounds for workers with "
            "`encoders=true` (encode). `up` gives each worker its role.",
            "--role",
            commands=("worker",),
        ),
    ] = "aggregated"
    worker_name: Annotated[
        str | None,
        Setting(
            "Name of this worker in logs, metrics and `worker drain`. Default: made up at start.",
            "--name",
            metavar="ID",
            key="name",
            commands=("worker",),
        ),
    ] = None  # the process start is appended to it
    engine_args: Annotated[
        Mapping[str, Any],
        Setting(
            "Setting of the engine itself, handed over unchanged; the value is read as JSON when it is JSON. Repeatable.",
            "--engine-arg",
            metavar="KEY=VALUE",
        ),
    ] = field(default_factory=dict)
    tool_parser: Annotated[
        str,
        Setting(
            "How tool calls are taken out of answers: a parser of the engine, by chat template and model family (auto), or not "
            "at all (none). A wrong name stops the start and lists the right ones.",
            "--tool-parser",
            metavar="NAME",
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        Setting(
            "How reasoning is taken out of answers: a parser of the engine, auto or none, as for tool calls.",
            "--reasoning-parser",
            metavar="NAME",
        ),
    ] = "auto"
    drain_grace_s: Annotated[
        float,
        Setting(
            "How long to finish or hand over work after SIGTERM.", "--drain-grace", least=0, most=86400, commands=("worker",)
        ),
    ] = 60.0
    metrics_port: Annotated[
        int | None,
        port_setting(
            "Port for /live, /ready, /health and /metrics of the worker; 0 picks a free one (`up`: of the first one, the next "
            "count up). Default: none, under `up` 0, with an address to listen on 9100.",
            "--metrics-port",
        ),
    ] = None
    metrics_host: Annotated[
        str, Setting("Address on which that port listens; 0.0.0.0 is every address of this machine.", "--metrics-host")
    ] = "127.0.0.1"
    peer_host: Annotated[
        str | None,
        Setting(
            "Address of this machine at which the engines of other workers meet its engine to fetch KV blocks. Default: the "
            "one from which it reaches the NATS server.",
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
            "An engine that has work and reports nothing for so long counts as dead, until its steps tell a better limit.",
            "--stall",
            least=0.1,
        ),
    ] = 120.0
    first_token_s: Annotated[
        float,
        Setting("A request that has not got its first token from the engine for this long is tried elsewhere.", least=0.1),
    ] = 300.0
    token_s: Annotated[
        float,
        Setting("A request that has not got another token for this long, while others have, is tried elsewhere.", least=0.1),
    ] = 120.0
    canary_s: Annotated[
        float,
        Setting("An engine that had nothing to do for this long gets a request of one token; 0 = never.", least=0),
    ] = 30.0
    canary_timeout_s: Annotated[
        float, Setting("An engine that does not answer that in this time counts as dead.", least=0.1)
    ] = 20.0
    separate_frames: Annotated[bool, Setting("Token frames on a NATS connection of their own.")] = (
        False  # measured slower: docs/performance.md
    )
    labels: Annotated[
        Sequence[str],
        Setting(
            "Labels that requests may require or prefer, separated by commas: zone, rack, kind of GPU.",
            "--labels",
            metavar="LABEL",
        ),
    ] = ()
    zone: Annotated[
        str,
        Setting(
            "Where this worker's machine is: routers count that KV blocks take longer from another zone. It is a label, too: "
            "zone=NAME. Default: not known.",
            "--zone",
            metavar="NAME",
        ),
    ] = ""
    fleet: Annotated[
        str,
        Setting(
            "Name of the workers of this model that are like this one: engine, hardware, parallelism, context length, price. "
            "Routers choose among the fleets of a model by the targets of each request.",
            "--fleet",
            metavar="NAME",
        ),
    ] = ""
    price: Annotated[
        float,
        Setting(
            "What this worker costs for an hour, in a unit that all fleets of its model share. Routers take the cheapest "
            "fleet that is soon enough.",
            "--price",
            least=0,
            most=1e9,
        ),
    ] = 0.0
    pool_block: Annotated[
        int,
        Setting(
            "Tokens of the blocks that the fleets of a model count by, where this worker is the first of them; those of its "
            "engine are a multiple of that. 0: those of its engine.",
            "--pool-block",
            least=0,
            most=65_536,
        ),
    ] = 0
    # Of a decode worker, where no router has decided.
    prefill: Annotated[
        PrefillMode,
        Setting(
            "Where a decode worker has prompts computed when no router has decided: by a prefill worker if it is long, always, "
            "or never.",
            "--prefill",
            commands=("worker",),
        ),
    ] = "auto"
    prefill_min_tokens: Annotated[
        int,
        Setting(
            "With auto: a prompt of which fewer tokens than this are not in its cache is computed by the decode worker.",
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
            "How long at least a decode worker waits for a prefill worker to take a job; then it computes the prompt itself.",
            "--prefill-wait",
            least=0.01,
            most=3600,
        ),
    ] = 2.0
    prefill_budget_tokens: Annotated[
        int,
        Setting("Prompt tokens that a prefill worker takes on at once; 0 is two engine steps.", "--prefill-budget", least=0),
    ] = 0
    transfer_timeout_s: Annotated[
        float,
        Setting(
            "Longest time from the hand-over of a computed prompt to the first token; then the decode worker computes it "
            "itself.",
            "--transfer-timeout",
            least=0.1,
            most=3600,
        ),
    ] = 10.0
    encode_wait_s: Annotated[
        float,
        Setting(
            "Longest time that a request waits for encode workers to encode its media; then its own worker does.",
            "--encode-wait",
            least=0.01,
            most=3600,
        ),
    ] = 5.0
    encode_nixl_bytes: Annotated[
        int,
        Setting(
            "Embeddings of at least so many bytes are read from the encode worker's memory over NIXL where both workers have "
            "it; smaller ones, or all with 0, go by the object store.",
            "--encode-nixl-from",
            least=0,
            metavar="BYTES",
        ),
    ] = 256 * 1024
    model_sources: Annotated[
        Sequence[str],
        Setting(
            "Where models, and tokenizers and draft models in the engine's settings, may come from, separated by commas: "
            "kinds (folder, hf, s3, …), and places with all below them (/models, hf://my-org, s3://bucket/path).",
            "--model-sources",
            metavar="SOURCE",
        ),
    ] = ("folder", "hf")
    adapter_sources: Annotated[
        Sequence[str],
        Setting(
            "Where adapters may come from, separated by commas: kinds (folder, store, hf, s3, https, http), and places with "
            "all below them (/adapters, hf://my-org, s3://bucket/path).",
            "--adapter-sources",
            metavar="SOURCE",
        ),
    ] = ("folder", "store")
    adapter_max_bytes: Annotated[int, Setting("Largest adapter to download.", least=1, metavar="BYTES")] = 2 * 1024**3
    adapter_cache: Annotated[
        str | None,
        Setting("Folder for downloaded adapters, one for all workers of a machine. Default: in the user's cache.", kind="path"),
    ] = None
    adapter_cache_bytes: Annotated[
        int, Setting("Adapters used least recently are removed from that folder beyond this.", least=1, metavar="BYTES")
    ] = 50 * 1024**3
    adapter_slots: Annotated[
        int,
        Setting(
            "Adapters that a worker has at once: for one more the least recently used is unloaded, of those that were loaded "
            "while it serves and that no request uses.",
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
            from headrace.workers.model_source import check_rules

            check_rules(self.model_sources)
        if any(rule not in ("folder", "store") for rule in self.adapter_sources):  # what reads more takes longer to import
            from headrace.workers.adapter_files.source import AllowedSources

            AllowedSources(self.adapter_sources)
        if len(self.fleet) > MOST_LABEL or not self.fleet.isprintable() or self.fleet != self.fleet.strip():
            raise ValueError(f"fleet {self.fleet!r}: up to {MOST_LABEL} printable characters")
        for label in (*self.labels, *([f"zone={self.zone}"] if self.zone else [])):
            if not label.strip() or len(label) > MOST_LABEL or "," in label:
                raise ValueError(f"label {label!r}: 1 to {MOST_LABEL} characters, no comma")
