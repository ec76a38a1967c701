"""Settings of the embedded NATS server."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from headrace.base.setting import Setting, port_setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of the embedded server. A port that was picked stays the same over restarts."""

    host: Annotated[str, Setting("Address the embedded NATS server listens on.", "--nats-host")] = "127.0.0.1"
    port: Annotated[int, port_setting("Port of the embedded NATS server; 0 picks a free one.", "--nats-port")] = 0
    monitoring_host: Annotated[str, Setting("Address of its HTTP monitoring port, which has no login.")] = "127.0.0.1"
    monitoring_port: Annotated[int, port_setting("Its HTTP monitoring port; 0 picks a free one.")] = 0
    login: Annotated[
        Literal["none", "one", "roles"],
        Setting(
            "Access to the embedded NATS server: one login with all rights, in the data folder (one); a login per "
            "role with the rights it needs (roles); every process of the machine (none).",
            "--nats-login",
        ),
    ] = "one"
    tenants: Annotated[
        Sequence[str],
        Setting("Tenants that store jobs over NATS: each gets a login.", "--nats-tenants"),
    ] = ()
    encrypt: Annotated[
        Literal["none", "aes"],
        Setting(
            "Whether the embedded NATS server encrypts what it stores on the disk: with AES-256 (aes), or not (none). An "
            "existing store is not converted. nats-server 2.15.1 can lose a whole stream of an encrypted store when it is "
            "killed.",
            "--nats-encrypt",
        ),
    ] = "none"
    store_key: Annotated[
        str | None,
        Setting(
            "File with the key of its store, created for an empty store. Default: `<data-dir>/nats/store.key`. "
            "Without it the data is lost; keep it apart from disk and backups.",
            "--nats-store-key",
            kind="path",
        ),
    ] = None
    tls_cert: Annotated[
        str | None,
        Setting("Certificate of the embedded NATS server, PEM; turns TLS on.", "--nats-server-cert", kind="path"),
    ] = None
    tls_key: Annotated[
        str | None, Setting("Its key, PEM, unless the certificate's file has it.", "--nats-server-key", kind="path")
    ] = None
    tls_client_ca: Annotated[
        str | None,
        Setting("CA certificate for client certificates, PEM; requires them.", "--nats-client-ca", kind="path"),
    ] = None
    sync_interval: Annotated[
        str, Setting("Interval of syncs to disk, such as 10s, or always: the most that a power cut can lose.")
    ] = "2m"
    max_memory_store: Annotated[str, Setting("Most memory for streams.")] = "1GB"
    max_file_store: Annotated[str, Setting("Most disk for streams.")] = "100GB"
    max_payload: Annotated[str, Setting("Largest message.")] = "1MB"
    max_connections: Annotated[int, Setting("Most connections at once.", least=16, most=1_000_000)] = 4096
    max_subscriptions: Annotated[int, Setting("Most subscriptions of one connection.", least=64, most=1_000_000)] = 8192
    processors: Annotated[
        int,
        Setting(
            "Cores it may use; 0: half of the machine's. On two cores that made serving a sixth faster.",
            least=0,
            most=1024,
        ),
    ] = 0  # half of the machine's is at least one
    memory_mib: Annotated[
        int,
        Setting(
            "Most memory it may write to, in MiB; 0 is half of the machine's, at least 2048. A damaged store can ask for any "
            "amount. Above max_memory_store.",
            least=0,
            most=1 << 24,
        ),
    ] = 0
    garbage_percent: Annotated[
        int,
        Setting(
            "Garbage before a collection, in percent of the memory in use (Go's `GOGC`, which overrides it). Less "
            "costs a little CPU.",
            least=10,
            most=1000,
        ),
    ] = 50
    extra: str = ""  # more lines for the configuration file
