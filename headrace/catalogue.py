"""Every setting of Headrace, as data.

One record gives a setting its flag, its environment variable, its TOML key, its type and limits, its default and its help
text, so that these cannot drift apart.  `headrace/settings.py` reads values by this table, `headrace/cli.py` makes flags of
it, `headrace config` prints it and `docs/operations.md` is checked against it.

Nothing heavy is imported here: `headrace --help` reads this module.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

Kind = Literal["text", "integer", "seconds", "number", "switch", "choice", "list", "path", "table"]
Command = Literal["up", "frontend", "worker", "router", "streams", "control", "model"]

ALL: tuple[Command, ...] = ("up", "frontend", "worker", "router", "streams", "control")
LOGGING: tuple[Command, ...] = (*ALL, "model")


class Setting(NamedTuple):
    """One setting. `key` is the TOML key; the environment variable follows from it."""

    key: str
    kind: Kind
    default: Any
    help: str
    commands: tuple[Command, ...]
    flag: str = ""
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    secret: bool = False
    metavar: str = ""

    @property
    def env(self) -> str:
        return "HEADRACE_" + self.key.replace(".", "_").upper()

    @property
    def dest(self) -> str:
        """The attribute of the parsed arguments."""
        return self.key.replace(".", "__")


_PORT: dict[str, Any] = {"least": 0, "most": 65535, "metavar": "PORT"}

GENERAL = (
    Setting(
        "data_dir",
        "path",
        ".headrace",
        "Folder for the NATS store and prepared models.",
        ("up", "worker", "model"),
        "--data-dir",
    ),
    Setting(
        "prefix",
        "text",
        "hr",
        "Prefix of every subject, stream and bucket: separates deployments on one NATS server.",
        ALL,
        "--prefix",
    ),
    Setting(
        "namespace",
        "text",
        "default",
        "Namespace of the served models; the same model in another namespace is another pool.",
        ("up", "frontend", "worker", "router", "control"),
        "--namespace",
    ),
    Setting(
        "log.format",
        "choice",
        "auto",
        "Log lines for people (console) or programs (json); auto: console on a terminal.",
        LOGGING,
        "--log-format",
        choices=("auto", "console", "json"),
    ),
    Setting(
        "log.level",
        "choice",
        "info",
        "Least level to log.",
        LOGGING,
        "--log-level",
        choices=("debug", "info", "warning", "error"),
    ),
)

NATS = (
    Setting(
        "nats.url",
        "list",
        (),
        "NATS servers, separated by commas. `up` without it runs its own server; "
        "the other commands then use nats://127.0.0.1:4222.",
        ALL,
        "--nats",
        metavar="URL",
    ),
    Setting(
        "nats.context",
        "text",
        None,
        "A context of the nats command line tool (name or file); settings given here win over it.",
        ALL,
        "--nats-context",
    ),
    Setting("nats.user", "text", None, "User name.", ALL, "--nats-user"),
    Setting(
        "nats.password",
        "text",
        None,
        "Password; better given by environment or file than on the command line.",
        ALL,
        secret=True,
    ),
    Setting("nats.token", "text", None, "Token.", ALL, secret=True),
    Setting("nats.credentials", "path", None, "Credentials file (.creds).", ALL, "--nats-credentials"),
    Setting("nats.nkey_seed", "path", None, "NKey seed file.", ALL, "--nats-nkey-seed"),
    Setting("nats.tls_ca", "path", None, "CA certificate of the server, PEM.", ALL, "--nats-tls-ca"),
    Setting("nats.tls_cert", "path", None, "Client certificate, PEM.", ALL, "--nats-tls-cert"),
    Setting("nats.tls_key", "path", None, "Client key, PEM.", ALL, "--nats-tls-key"),
    Setting("nats.tls_first", "switch", False, "TLS handshake before the server's greeting.", ALL, "--nats-tls-first"),
    Setting(
        "nats.inbox_prefix",
        "text",
        None,
        "Subject prefix for replies, where permissions ask for one.",
        ALL,
        "--nats-inbox-prefix",
    ),
    Setting(
        "nats.connect_timeout_s",
        "seconds",
        5.0,
        "Longest wait for one connection attempt.",
        ALL,
        "--nats-connect-timeout",
        least=0.1,
        most=300,
    ),
)

_UP: tuple[Command, ...] = ("up",)

SERVER = (
    Setting("server.host", "text", "127.0.0.1", "Address the embedded NATS server listens on.", _UP, "--nats-host"),
    Setting("server.port", "integer", 0, "Port of the embedded NATS server; 0 picks a free one.", _UP, "--nats-port", **_PORT),
    Setting("server.monitoring_port", "integer", 0, "Its HTTP monitoring port; 0 picks a free one.", _UP, **_PORT),
    Setting(
        "server.sync_interval",
        "text",
        "2m",
        "How often it syncs to disk: a duration such as 10s, or always. This is what a power cut may cost.",
        _UP,
    ),
    Setting("server.max_memory_store", "text", "1GB", "Most memory for streams.", _UP),
    Setting("server.max_file_store", "text", "100GB", "Most disk for streams.", _UP),
    Setting("server.max_payload", "text", "1MB", "Largest message.", _UP),
    Setting(
        "server.processors",
        "integer",
        0,
        "Cores it may use at once; 0 is half of the machine's. On two cores that alone made serving a sixth faster.",
        _UP,
        least=0,
        most=1024,
    ),
)

UP = (
    Setting("up.workers", "integer", 1, "Engine workers to run.", ("up",), "--workers", least=0, most=1024, metavar="N"),
    Setting(
        "up.routers",
        "integer",
        1,
        "Routers to run; with none, workers place requests on themselves.",
        ("up",),
        "--routers",
        least=0,
        most=64,
        metavar="N",
    ),
    Setting(
        "up.grace_s",
        "seconds",
        15.0,
        "How long workers may finish or hand over their work after Ctrl-C.",
        ("up",),
        "--grace",
        least=0,
        most=3600,
    ),
)

_HTTP: tuple[Command, ...] = ("up", "frontend")
_HTTP_ONLY: tuple[Command, ...] = ("frontend",)

FRONTEND = (
    Setting("frontend.host", "text", "127.0.0.1", "Address to listen on.", _HTTP, "--host"),
    Setting("frontend.port", "integer", 8000, "Port to listen on; 0 picks a free one.", _HTTP, "--port", **_PORT),
    Setting(
        "frontend.backlog",
        "integer",
        2048,
        "Connections the kernel may hold before they are accepted.",
        _HTTP,
        least=1,
        most=65535,
    ),
    Setting("frontend.keep_alive_s", "seconds", 75.0, "An idle connection is closed after this.", _HTTP, least=0.1),
    Setting(
        "frontend.body_timeout_s",
        "seconds",
        30.0,
        "Longest time from a request's headers to the end of its body.",
        _HTTP,
        least=0.1,
    ),
    Setting(
        "frontend.max_body_bytes",
        "integer",
        32 * 1024 * 1024,
        "Largest request body.",
        _HTTP,
        "--max-body",
        least=1,
        metavar="BYTES",
    ),
    Setting("frontend.deadline_s", "seconds", 600.0, "Deadline of a request that names none.", _HTTP, "--deadline", least=0.1),
    Setting(
        "frontend.max_deadline_s", "seconds", 3600.0, "Longest deadline a request may name.", _HTTP, "--max-deadline", least=0.1
    ),
    Setting("frontend.max_choices", "integer", 128, "Most answers of one request: n times its prompts.", _HTTP, least=1),
    Setting(
        "frontend.sse_keepalive_s",
        "seconds",
        0.0,
        "A comment line on a stream that was silent this long; 0 sends none.",
        _HTTP,
        least=0,
    ),
    Setting(
        "frontend.inline_prompt_bytes", "integer", 8192, "Prompts longer than this are tokenised in a thread.", _HTTP, least=1
    ),
    Setting("frontend.tokenizer_threads", "integer", 2, "Threads for long prompts.", _HTTP, least=1, most=256),
    Setting(
        "frontend.drain_grace_s",
        "seconds",
        30.0,
        "How long running answers may go on after SIGTERM.",
        _HTTP_ONLY,
        "--drain-grace",
        least=0,
    ),
    Setting("frontend.start_timeout_s", "seconds", 30.0, "Longest wait for the NATS server at start.", _HTTP, least=0.1),
    Setting("frontend.access_log", "switch", True, "One log line per request.", _HTTP, "--access-log"),
)

WORKER = (
    Setting(
        "worker.engine",
        "choice",
        "vllm",
        "Engine to run: vLLM, or the simulator (no model needed).",
        ("up", "worker"),
        "--engine",
        choices=("vllm", "sim"),
    ),
    Setting(
        "worker.model",
        "text",
        None,
        "Hugging Face id or folder of the model. vllm without it: the bundled small chat model.",
        ("up", "worker"),
        "--model",
        metavar="M",
    ),
    Setting(
        "worker.served_name",
        "text",
        None,
        "Model name that clients use. Default: the model's own name.",
        ("up", "worker"),
        "--served-name",
        metavar="NAME",
    ),
    Setting(
        "worker.role",
        "choice",
        "aggregated",
        "What the worker does for a request.",
        ("worker",),
        "--role",
        choices=("aggregated", "prefill", "decode", "encode", "embedding"),
    ),
    Setting(
        "worker.name",
        "text",
        None,
        "Name of this worker in logs, metrics and `worker drain`. Default: made up at start.",
        ("worker",),
        "--name",
        metavar="ID",
    ),
    Setting(
        "worker.slots",
        "integer",
        None,
        "Sequences run at once. Default: the engine's own.",
        ("up", "worker"),
        "--slots",
        least=1,
        most=65536,
        metavar="N",
    ),
    Setting(
        "worker.engine_args",
        "table",
        {},
        "Setting of the engine itself, handed over unchanged; the value is read as JSON when it is JSON. Repeatable.",
        ("up", "worker"),
        "--engine-arg",
        metavar="KEY=VALUE",
    ),
    Setting(
        "worker.drain_grace_s",
        "seconds",
        60.0,
        "How long to finish or hand over work after SIGTERM.",
        ("worker",),
        "--drain-grace",
        least=0,
        most=86400,
    ),
    Setting(
        "worker.metrics_port",
        "integer",
        None,
        "Port for /metrics of the worker; 0 picks a free one (`up`: of the first one, the next count up). Default: none.",
        ("up", "worker"),
        "--metrics-port",
        **_PORT,
    ),
    Setting(
        "worker.start_timeout_s",
        "seconds",
        900.0,
        "Longest wait for the engine to load its model.",
        ("up", "worker"),
        "--start-timeout",
        least=0.1,
    ),
    Setting(
        "worker.stall_s",
        "seconds",
        120.0,
        "An engine that has work and reports nothing for this long counts as dead.",
        ("up", "worker"),
        "--stall",
        least=0.1,
    ),
    Setting("worker.separate_frames", "switch", False, "Token frames on a NATS connection of their own.", ("up", "worker")),
    Setting(
        "worker.labels",
        "list",
        (),
        "Labels that requests may require or prefer, separated by commas: zone, rack, kind of GPU.",
        ("up", "worker"),
        "--labels",
        metavar="LABEL",
    ),
)

_PLACING: tuple[Command, ...] = ("up", "router")
_ROUTER: tuple[Command, ...] = ("router",)

ROUTER = (
    Setting(
        "router.name", "text", None, "Name of this router in logs. Default: made up at start.", _ROUTER, "--name", metavar="ID"
    ),
    Setting(
        "router.models",
        "list",
        (),
        "Route for these models only, separated by commas. Default: all of the namespace, as they come.",
        _ROUTER,
        "--model",
        metavar="M",
    ),
    Setting(
        "router.window",
        "integer",
        2048,
        "Requests of one class held back for placement. Well above any burst, or waiting workers take a part of it.",
        _PLACING,
        "--window",
        least=1,
        most=20_000,
        metavar="N",
    ),
    Setting(
        "router.policy",
        "choice",
        "kv",
        "How to choose a worker: by cached prefix and load, by load, in turn, at random, the better of two, as requests say.",
        _PLACING,
        "--policy",
        choices=("kv", "least-loaded", "round-robin", "random", "power-of-two", "direct"),
    ),
    Setting(
        "router.temperature",
        "number",
        0.0,
        "How softly to choose: 0 is always the cheapest worker, above it others too, cheaper ones more often.",
        _PLACING,
        "--placement-temperature",
        least=0,
    ),
    Setting(
        "router.max_wait_s",
        "seconds",
        60.0,
        "A request that has waited this long waits for no cache any more and goes before all that have waited less.",
        _PLACING,
        least=0.1,
    ),
    Setting(
        "router.tier_weights",
        "table",
        {},
        "Part of a block's prefill that finding it in a tier saves. Default: device=1, host=0.75, disk=0.25. Repeatable.",
        _PLACING,
        "--tier-weight",
        metavar="TIER=PART",
    ),
    Setting(
        "router.tenant_weights",
        "table",
        {},
        "Share of a tenant relative to others when all want more than there is; 1 for those not named. Repeatable.",
        _PLACING,
        "--tenant-weight",
        metavar="TENANT=WEIGHT",
    ),
    Setting(
        "router.tenant_requests",
        "integer",
        0,
        "Most requests of one tenant that wait in a router while others wait too; more are refused. 0: 70 % of the window.",
        _PLACING,
        "--tenant-requests",
        least=0,
    ),
    Setting(
        "router.tuning",
        "table",
        {},
        "Any other setting of the scheduler, by the names in docs/routing.md. Repeatable.",
        _PLACING,
        "--tuning",
        metavar="KEY=VALUE",
    ),
    Setting(
        "router.index_wait_s",
        "seconds",
        5.0,
        "Longest wait at start until the index knows what workers have in their caches.",
        _PLACING,
        least=0,
        most=3600,
    ),
    Setting(
        "router.index_entries",
        "integer",
        10_000_000,
        "Most blocks in the index of one model, counted once per worker and tier; 0 is no limit. The least useful go first.",
        _PLACING,
        least=0,
    ),
    Setting(
        "router.snapshot_events",
        "integer",
        5000,
        "Cache events after which the index is written down, so that a router that starts need not read them again.",
        _PLACING,
        least=1,
    ),
    Setting("router.snapshot_s", "seconds", 60.0, "The same after this time, when there was any event.", _PLACING, least=1),
    Setting(
        "router.snapshots",
        "integer",
        2,
        "Snapshots kept, and the cache events behind the oldest with them: `headrace replay index` reaches back so far.",
        _PLACING,
        least=2,
        most=1000,
    ),
    Setting("router.record", "switch", True, "Keep a record of every placement, for `headrace replay`.", _PLACING, "--record"),
    Setting(
        "router.metrics_port",
        "integer",
        None,
        "Port for /metrics of the router; 0 picks a free one (`up`: of the first one, the next count up). Default: none.",
        _PLACING,
        "--router-metrics-port",
        **_PORT,
    ),
    Setting(
        "router.drain_grace_s",
        "seconds",
        10.0,
        "How long placements in flight may take to be confirmed after SIGTERM.",
        _ROUTER,
        "--drain-grace",
        least=0,
        most=3600,
    ),
    Setting("router.start_timeout_s", "seconds", 30.0, "Longest wait for the NATS server at start.", _PLACING, least=0.1),
)

SETTINGS: tuple[Setting, ...] = (*GENERAL, *NATS, *SERVER, *UP, *FRONTEND, *WORKER, *ROUTER)
BY_KEY = {setting.key: setting for setting in SETTINGS}
BY_ENV = {setting.env: setting for setting in SETTINGS}

# Variables that are no settings but belong to Headrace.
OTHER_ENV = {
    "HEADRACE_CONFIG": "the TOML file to read",
    "HEADRACE_SUPERVISOR_PID": "set by `headrace up` for its parts: they end when that process does",
}


def settings_of(command: Command) -> list[Setting]:
    """The settings a command uses."""
    return [setting for setting in SETTINGS if command in setting.commands]
