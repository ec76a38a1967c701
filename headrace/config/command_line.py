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
            "Folder for the NATS store and prepared models. Commands without an address find the `up` that runs with it.",
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
            "Keys that clients of the HTTP frontend must give, separated by commas. Each may do everything; `headrace keys` "
            "makes keys that may do less.",
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
        Setting("Log lines for people (console) or programs (json); auto: console on a terminal.", "--log-format"),
    ] = "auto"
    level: Annotated[LogLevel, Setting("Least level to log.", "--log-level")] = "info"


class NatsServers(NamedTuple):
    """Addresses of the NATS servers. `ConnectOptions` holds how to log in to them."""

    url: Annotated[
        Sequence[str],
        Setting(
            "NATS servers, separated by commas. `up` without it runs its own server, which commands that ask or tell find by "
            "<data-dir>/run/up.json; parts and, without that file, commands use nats://127.0.0.1:4222.",
            "--nats",
            metavar="URL",
        ),
    ] = ()
    context: Annotated[
        str | None,
        Setting("A context of the nats command line tool (name or file); settings given here win over it.", "--nats-context"),
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
            "Workers that encode images for the others, of a model that takes media, on vLLM only.",
            "--encode-workers",
            least=0,
            most=1024,
            metavar="N",
        ),
    ] = 0
    pools: Annotated[
        Mapping[str, Any],
        Setting(
            "A further model on workers of its own, maybe another engine's, by the name that clients use: "
            'small={"engine": "sglang", "workers": 2}. It has the settings of worker, and mode and workers of up. Repeatable.',
            "--pool",
            metavar="NAME=JSON",
            names=True,
        ),
    ] = {}
    frontends: Annotated[
        int,
        Setting(
            "HTTP frontends to run, all on one port; the kernel spreads connections over them.",
            "--frontends",
            least=1,
            most=64,
            metavar="N",
        ),
    ] = 1
    routers: Annotated[
        int,
        Setting("Routers to run; with none, workers place requests on themselves.", "--routers", least=0, most=64, metavar="N"),
    ] = 1
    console: Annotated[bool, Setting("Serve the console, which shows the deployment in a browser.", "--console")] = True
    grace_s: Annotated[
        float,
        Setting("How long workers may finish or hand over their work after Ctrl-C.", "--grace", least=0, most=3600),
    ] = 15.0
    verbose: Annotated[
        bool,
        Setting(
            "Show every log line on a terminal too, instead of a few lines; elsewhere all are shown anyway.",
            "--verbose",
            short="-v",
        ),
    ] = False


class Console(NamedTuple):
    """Settings of the console, the view of a deployment in a browser."""

    host: Annotated[str, Setting("Address on which the console listens.", "--console-host")] = "127.0.0.1"
    port: Annotated[
        int,
        port_setting("Port of the console; 0 picks a free one. `up` takes a free one if this one is taken.", "--console-port"),
    ] = 8001
    key: Annotated[
        str | None,
        Setting(
            "Admin key of the console, without which it only shows. Default: a new one at each start, part of the link.",
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
            "Address of the frontend for the playground. Default: that of the running `up`.",
            "--frontend",
            metavar="URL",
            commands=("console",),
        ),
    ] = None
    allow_kill: Annotated[
        bool,
        Setting(
            "Let those with the key kill workers of this machine, to see what becomes of their streams. For development.",
            "--allow-kill",
        ),
    ] = False


class WorkerPool(NamedTuple):
    """The pool of a worker, where a deployment has several of its own."""

    pool: Annotated[
        str | None,
        Setting(
            "The pool of `up.pools` that this worker belongs to and has its settings from. `up` says it to its workers.",
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
            "Sequences run at once. Default: the engine's own.",
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
