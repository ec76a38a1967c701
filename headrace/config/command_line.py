"""Declares the settings that belong to the command line itself: logging, where NATS is, and what `headrace up` runs."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from headrace.base.setting import Setting, port_setting

LogFormat = Literal["auto", "console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
Mode = Literal["aggregated", "disagg"]


class Deployment(NamedTuple):
    """Settings of the deployment that a command belongs to."""

    data_dir: Annotated[
        str,
        Setting(
            "Folder for the NATS store and prepared models. Commands without an address use the `up` that runs with it.",
            "--data-dir",
            kind="path",
            commands=("up", "worker", "model", "streams", "control", "console", "planner"),
        ),
    ] = ".headrace"
    prefix: Annotated[
        str, Setting("Prefix of every subject, stream and bucket: separates deployments on one NATS server.", "--prefix")
    ] = "hr"
    namespace: Annotated[
        str,
        Setting(
            "Namespace of the served models; the same model in another namespace is another pool.",
            "--namespace",
            commands=("up", "frontend", "worker", "router", "control", "console", "planner"),
        ),
    ] = "default"
    api_key: Annotated[
        Sequence[str],
        Setting(
            "API keys for the HTTP frontend, separated by commas, with all rights; `headrace keys` makes keys with fewer.",
            "--api-key",
            metavar="KEY,…",
            secret=True,
            commands=("up", "frontend"),
        ),
    ] = ()


class Logging(NamedTuple):
    """Settings of the log of every process."""

    format: Annotated[
        LogFormat,
        Setting("Readable lines (console) or JSON; auto: console on a terminal.", "--log-format"),
    ] = "auto"
    level: Annotated[LogLevel, Setting("Lowest level to log.", "--log-level")] = "info"


class NatsServers(NamedTuple):
    """Addresses of the NATS servers. `ConnectOptions` holds how to log in to them."""

    url: Annotated[
        Sequence[str],
        Setting(
            "NATS servers, separated by commas. Default: `up` runs its own, commands use the one in "
            "<data-dir>/run/up.json, others nats://127.0.0.1:4222.",
            "--nats",
            metavar="URL",
        ),
    ] = ()
    context: Annotated[
        str | None,
        Setting("Context of the nats command line tool (name or file); other settings override it.", "--nats-context"),
    ] = None


class Up(NamedTuple):
    """Numbers of the parts that `headrace up` runs."""

    mode: Annotated[
        Mode,
        Setting(
            "aggregated: each worker computes prompts and answers. disagg: prefill workers compute prompts for decode workers.",
            "--mode",
        ),
    ] = "aggregated"
    workers: Annotated[
        int | None,
        Setting(
            "Aggregated engine workers to run. Default: 1, with `--mode disagg` none.",
            "--workers",
            least=0,
            most=1024,
            metavar="N",
        ),
    ] = None
    prefill_workers: Annotated[
        int | None,
        Setting(
            "Prefill workers to run, only with `--mode disagg`. Default there: 1.",
            "--prefill-workers",
            least=0,
            most=1024,
            metavar="N",
        ),
    ] = None
    decode_workers: Annotated[
        int | None,
        Setting(
            "Decode workers to run, only with `--mode disagg`. Default there: 1.",
            "--decode-workers",
            least=0,
            most=1024,
            metavar="N",
        ),
    ] = None
    encode_workers: Annotated[
        int,
        Setting(
            "Workers that encode images for the others; only for vLLM and models with media.",
            "--encode-workers",
            least=0,
            most=1024,
            metavar="N",
        ),
    ] = 0
    pools: Annotated[
        Mapping[str, Any],
        Setting(
            'A further model with its own workers, by its client name: small={"engine": "sglang", "workers": 2}. '
            "It takes the settings of worker, and mode and workers of up. Repeatable.",
            "--pool",
            metavar="NAME=JSON",
            names=True,
        ),
    ] = {}
    frontends: Annotated[
        int,
        Setting(
            "HTTP frontends to run on one port; the kernel spreads connections.",
            "--frontends",
            least=1,
            most=64,
            metavar="N",
        ),
    ] = 1
    routers: Annotated[
        int,
        Setting("Routers to run; with none, workers place requests themselves.", "--routers", least=0, most=64, metavar="N"),
    ] = 1
    console: Annotated[bool, Setting("Serve the console, which shows the deployment in a browser.", "--console")] = True
    grace_s: Annotated[
        float,
        Setting("Time for workers to finish or migrate their work after Ctrl-C.", "--grace", least=0, most=3600),
    ] = 15.0
    verbose: Annotated[
        bool,
        Setting(
            "Show every log line on a terminal, instead of a few.",
            "--verbose",
            short="-v",
        ),
    ] = False


class Console(NamedTuple):
    """Settings of the console, the view of a deployment in a browser."""

    host: Annotated[str, Setting("Address to listen on.", "--console-host")] = "127.0.0.1"
    port: Annotated[
        int,
        port_setting("Port of the console; 0 picks a free one, as does `up` if it is taken.", "--console-port"),
    ] = 8001
    key: Annotated[
        str | None,
        Setting(
            "Admin key of the console; without it the console is read-only. Default: a new one per start, in the link.",
            secret=True,
            metavar="KEY",
        ),
    ] = None
    private: Annotated[bool, Setting("Show nothing without the key, also on a loopback address.", "--console-private")] = False
    tls_cert: Annotated[
        str | None,
        Setting("Certificate chain of the console, PEM: HTTPS in place of HTTP.", "--console-tls-cert", kind="path"),
    ] = None
    tls_key: Annotated[
        str | None,
        Setting("Its private key, PEM. Default: in the certificate's file.", "--console-tls-key", kind="path"),
    ] = None
    frontend: Annotated[
        str | None,
        Setting(
            "Address of the frontend for the playground. Default: of the running `up`.",
            "--frontend",
            metavar="URL",
            commands=("console",),
        ),
    ] = None
    allow_kill: Annotated[
        bool,
        Setting(
            "Let users with the key kill workers of this machine, for development.",
            "--allow-kill",
        ),
    ] = False


class WorkerPool(NamedTuple):
    """The pool of a worker, where a deployment has several of its own."""

    pool: Annotated[
        str | None,
        Setting(
            "Pool of `up.pools` with this worker's settings. `up` sets it.",
            "--pool",
            metavar="NAME",
            commands=("worker",),
        ),
    ] = None


class EngineSlots(NamedTuple):
    """A setting that each engine has under a name of its own."""

    slots: Annotated[
        int | None,
        Setting(
            "Concurrent sequences. Default: the engine's.",
            "--slots",
            least=1,
            most=65536,
            metavar="N",
            after="worker.name",
        ),
    ] = None


class SchedulerTuning(NamedTuple):
    """The settings of the scheduler that have no flag of their own."""

    tuning: Annotated[
        Mapping[str, Any],
        Setting(
            "Any other setting of the scheduler, by the names in docs/routing.md. Repeatable.",
            "--tuning",
            metavar="KEY=VALUE",
        ),
    ] = {}
