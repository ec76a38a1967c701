"""Settings of every command: logging, and how to reach NATS."""

from __future__ import annotations

from headrace.config.catalogue.setting import ALL, LOGGING, Setting

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
