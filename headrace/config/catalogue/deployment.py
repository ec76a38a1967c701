"""Settings of `headrace up`: its NATS server, and how many of which part it runs."""

from __future__ import annotations

from headrace.config.catalogue.setting import PORT, Command, Setting

_UP: tuple[Command, ...] = ("up",)

SERVER = (
    Setting("server.host", "text", "127.0.0.1", "Address the embedded NATS server listens on.", _UP, "--nats-host"),
    Setting("server.port", "integer", 0, "Port of the embedded NATS server; 0 picks a free one.", _UP, "--nats-port", **PORT),
    Setting("server.monitoring_port", "integer", 0, "Its HTTP monitoring port; 0 picks a free one.", _UP, **PORT),
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
    Setting(
        "up.mode",
        "choice",
        "aggregated",
        "aggregated: each worker computes prompts and answers. disagg: prefill workers compute prompts for decode workers.",
        ("up",),
        "--mode",
        choices=("aggregated", "disagg"),
    ),
    Setting(
        "up.workers",
        "integer",
        None,
        "Aggregated engine workers to run. Default: 1, with `--mode disagg` none.",
        ("up",),
        "--workers",
        least=0,
        most=1024,
        metavar="N",
    ),
    Setting(
        "up.prefill_workers",
        "integer",
        None,
        "Prefill workers to run, only with `--mode disagg`. Default there: 1.",
        ("up",),
        "--prefill-workers",
        least=0,
        most=1024,
        metavar="N",
    ),
    Setting(
        "up.decode_workers",
        "integer",
        None,
        "Decode workers to run, only with `--mode disagg`. Default there: 1.",
        ("up",),
        "--decode-workers",
        least=0,
        most=1024,
        metavar="N",
    ),
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
