"""Declares the settings of the HTTP frontend. Durations are in seconds, sizes in bytes."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from headrace.base.setting import Setting, check_numbers, port_setting

AUDIT_LEAVABLE = ("key", "client_id", "model", "workers", "request", "answer")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s*]+\Z", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendSettings:
    """Settings of one frontend process. Raises ValueError naming the setting and its value."""

    host: Annotated[str, Setting("Address to listen on.", "--host")] = "127.0.0.1"
    port: Annotated[int, port_setting("Port to listen on; 0 picks a free one.", "--port")] = 8000
    share_port: Annotated[
        bool,
        Setting("Share the port with other frontends of the same user; the kernel spreads connections."),
    ] = False
    own_port: Annotated[
        int,
        Setting("Additional port of this frontend for probes and metrics; 0: none.", least=0, most=65535),
    ] = 0
    backlog: Annotated[int, Setting("Connections the kernel may hold before they are accepted.", least=1, most=65535)] = 2048
    keep_alive_s: Annotated[float, Setting("Time until an idle connection is closed.", least=0.1)] = 75.0
    body_timeout_s: Annotated[float, Setting("Longest time from a request's headers to the end of its body.", least=0.1)] = 30.0
    max_body_bytes: Annotated[int, Setting("Largest request body.", "--max-body", least=1, metavar="BYTES")] = 32 * 1024 * 1024
    body_memory_bytes: Annotated[
        int,
        Setting("Memory for incomplete bodies of all connections; more are refused.", least=1, metavar="BYTES"),
    ] = 512 * 1024 * 1024
    deadline_s: Annotated[float, Setting("Default deadline of a request.", "--deadline", least=0.1)] = 600.0
    max_deadline_s: Annotated[float, Setting("Longest deadline of a request.", "--max-deadline", least=0.1)] = (
        3600.0  # a request that asks for more gets this
    )
    broker_wait_s: Annotated[
        float | None,
        Setting(
            "Wait of a new request for the broker, a stream's leader or this frontend's lease; 0: none. Default: "
            "3, in a cluster of NATS servers 15.",
            least=0,
        ),
    ] = None
    no_worker_wait_s: Annotated[
        float,
        Setting(
            "Wait of a request for a known model without a worker, at most its deadline; 0: none.",
            "--no-worker-wait",
            least=0,
        ),
    ] = 10.0
    max_choices: Annotated[int, Setting("Most answers of one request: n times its prompts.", least=1)] = 128
    max_inputs: Annotated[int, Setting("Most inputs of an embeddings, score or class request.", least=1)] = 2048
    job_inputs: Annotated[int, Setting("Inputs of one job; a request with more is split.", least=1)] = 16
    job_input_tokens: Annotated[int, Setting("Tokens of such a job if it has several inputs.", least=1)] = 8192
    sse_gather_s: Annotated[
        float,
        Setting(
            "Longest wait of an event to be sent with later ones, with 160 streams; less with fewer; 0: none.",
            least=0,
        ),
    ] = 0.008
    sse_keepalive_s: Annotated[
        float, Setting("Send a comment on a stream that was silent for this time; 0: never.", least=0)
    ] = 0.0
    slow_client_s: Annotated[float, Setting("Cut an answer if its client reads nothing for this time.", least=0.1)] = 60.0
    inline_prompt_bytes: Annotated[int, Setting("Prompts longer than this are tokenized in a thread.", least=1)] = 8192
    prompt_cache_bytes: Annotated[
        int,
        Setting("Memory for prefixes of long prompts; 0: none.", least=0, metavar="BYTES"),
    ] = 64 * 1024 * 1024
    tokenizer_threads: Annotated[int, Setting("Threads for long prompts.", least=1, most=256)] = 2
    fast_tokenizer: Annotated[
        bool,
        Setting("Use fastokens if it gives the same ids: faster, for some 60 MB per model.", "--fast-tokenizer"),
    ] = True
    drain_grace_s: Annotated[
        float,
        Setting("Time for running answers after SIGTERM.", "--drain-grace", least=0, commands=("frontend",)),
    ] = 30.0
    carry_jobs: Annotated[
        bool,
        Setting("Run stored jobs: batches, jobs published over NATS, durable and background answers.", "--carry-jobs"),
    ] = True  # off: this frontend takes them from clients and leaves them to others
    start_timeout_s: Annotated[float, Setting("Longest wait for the NATS server at start.", least=0.1)] = 30.0
    access_log: Annotated[bool, Setting("One log line per request.", "--access-log")] = True
    target_first_token_s: Annotated[
        float,
        Setting(
            "Latest first token of an answer that meets its target (headrace_frontend_sla_requests_total); 0: no target.",
            least=0,
        ),
    ] = 2.0
    target_token_s: Annotated[
        float, Setting("Longest time per later token of an answer that meets its target; 0: no target.", least=0)
    ] = 0.1
    trace_endpoint: Annotated[
        str | None,
        Setting(
            "Send traces of generating requests to this OTLP/HTTP address (extra otel).", "--trace-endpoint", metavar="URL"
        ),
    ] = None
    trace_sample: Annotated[
        float,
        Setting(
            "Share of requests to trace without a traceparent; errors, moves and late answers are always traced.",
            "--trace-sample",
            least=0,
            most=1,
        ),
    ] = 0.1
    audit: Annotated[
        Literal["off", "metadata", "content"],
        Setting(
            "Record each generating request in the stream AUDIT: metadata only, or with its content.",
            "--audit",
        ),
    ] = "off"
    audit_redact: Annotated[
        str | None,
        Setting("File of regular expressions, one per line, to redact in these records.", kind="path"),
    ] = None
    audit_leave_out: Annotated[
        Sequence[str],
        Setting("Fields to omit from these records: key, client_id, model, workers, request, answer.", metavar="FIELD,…"),
    ] = ()
    # connections
    max_connections: Annotated[int, Setting("Most connections; above it idle ones are closed.", least=1)] = (
        4096  # without idle ones the new ones are refused
    )
    header_timeout_s: Annotated[float, Setting("Longest time to receive a request's headers.", least=0.1)] = (
        20.0  # from the first byte of a request, or from the connection
    )
    max_header_bytes: Annotated[int, Setting("Largest request line and headers.", least=1024)] = 64 * 1024
    max_pipelined: Annotated[int, Setting("Requests waiting on one connection.", least=0)] = 16
    tls_cert: Annotated[
        str | None,
        Setting(
            "Certificate chain, PEM: HTTPS instead of HTTP. Reread when the file changes.",
            "--tls-cert",
            kind="path",
        ),
    ] = None
    tls_key: Annotated[
        str | None,
        Setting("Its private key, PEM. Default: in the certificate's file.", "--tls-key", kind="path"),
    ] = None
    # who may ask
    auth: Annotated[
        Literal["auto", "keys"],
        Setting("keys: every request needs a valid key. auto: once a key exists.", "--auth"),
    ] = "auto"
    insecure: Annotated[
        bool,
        Setting("Listen for other machines without a key or login.", "--insecure"),
    ] = False
    card_key: Annotated[
        str | None,
        Setting("File with the key that must have signed model cards. Workers have the same.", kind="path"),
    ] = None
    jwt_keys: Annotated[
        str | None,
        Setting(
            "Signing keys (JWKS, address or file) of an identity provider whose tokens are accepted as API keys.",
            "--jwt-keys",
            metavar="URL|FILE",
        ),
    ] = None
    jwt_issuer: Annotated[str | None, Setting("Required issuer (iss) of these tokens.", "--jwt-issuer")] = None
    jwt_audience: Annotated[str | None, Setting("Required audience (aud) of these tokens.", "--jwt-audience")] = None
    jwt_tenant_claim: Annotated[str, Setting("Claim with the tenant.", "--jwt-tenant-claim")] = "sub"
    allowed_hosts: Annotated[
        Sequence[str],
        Setting(
            "Host names besides localhost for requests without a key; * is any.",
            "--allowed-hosts",
            metavar="NAME,…",
        ),
    ] = ()
    open_metrics: Annotated[bool, Setting("Serve /metrics without a key.", "--open-metrics")] = False
    cache_isolation: Annotated[
        Literal["auto", "on", "off"],
        Setting("Separate the prefix caches of tenants, so that none can probe another's prompts. auto: with keys in force."),
    ] = "auto"
    cors_origins: Annotated[
        Sequence[str],
        Setting("Origins of web pages that may call this server from a browser.", metavar="ORIGIN,…"),
    ] = ()
    # request bodies
    max_json_depth: Annotated[int, Setting("Deepest nesting of a request body.", least=8, most=200)] = 64
    max_json_values: Annotated[int, Setting("Most values in a request body.", least=1000)] = (
        1_200_000  # a prompt of a million token ids fits
    )
    max_json_containers: Annotated[
        int, Setting("Most lists, objects and members of objects in a request body.", least=1000)
    ] = 100_000
    # images, videos and sounds
    media_fetch: Annotated[bool, Setting("Fetch images, videos and sounds from URLs in requests.", "--media-fetch")] = (
        True  # off: only bytes that come with the request
    )
    media_domains: Annotated[
        Sequence[str], Setting("Fetch media only from these domains and their subdomains.", metavar="DOMAIN,…")
    ] = ()  # empty = from anywhere
    media_private: Annotated[bool, Setting("Fetch media also from private and loopback addresses, for tests.")] = (
        False  # link-local addresses as well
    )
    media_decode: Annotated[bool, Setting("Decode images here and send pixels to the workers.", "--media-decode")] = False
    media_max_bytes: Annotated[int, Setting("Largest media item.", least=1, metavar="BYTES")] = 20 * 1024 * 1024
    media_max_total_bytes: Annotated[
        int, Setting("Largest size of all media items of a request.", least=1, metavar="BYTES")
    ] = 48 * 1024 * 1024
    media_max_items: Annotated[int, Setting("Most media items in a request.", least=1)] = 16
    media_timeout_s: Annotated[float, Setting("Longest time from a media URL to its last byte.", least=0.1)] = 15.0
    media_fetches: Annotated[int, Setting("Media URLs fetched at once, of all requests.", least=1, most=256)] = 16
    # the Responses API and Anthropic's
    response_ttl_s: Annotated[float, Setting("Life of a stored response.", "--response-ttl", least=1)] = 30 * 86_400.0
    response_max_bytes: Annotated[
        int,
        Setting("Largest turn to store; larger ones are answered only.", least=1024, metavar="BYTES"),
    ] = 8 * 1024 * 1024
    response_max_turns: Annotated[int, Setting("Longest conversation by previous_response_id.", least=1)] = 512
    response_store_s: Annotated[float, Setting("Longest wait for storing an answer.", least=0.1)] = 2.0
    adapter_routes: Annotated[
        bool,
        Setting(
            "Let clients load and unload adapters from folders of the workers: /v1/load_lora_adapter, /v1/unload_lora_adapter.",
            "--adapter-routes",
        ),
    ] = False
    strip_billing_header: Annotated[
        bool,
        Setting(
            "Remove Claude Code's changing line from system prompts, which would defeat prefix caching.",
            "--strip-billing-header",
        ),
    ] = True
    hosted_tools: Annotated[
        Literal["leave-out", "refuse"],
        Setting(
            "Tools that only OpenAI's or Anthropic's servers run, such as web_search. leave-out: the model is not offered "
            "them, and a header reports it. refuse: 400.",
            "--hosted-tools",
        ),
    ] = "leave-out"
    # files
    file_max_bytes: Annotated[int, Setting("Largest file of a client.", least=1, metavar="BYTES")] = 512 * 1024 * 1024
    batch_file_max_bytes: Annotated[int, Setting("Largest input file of a batch.", least=1, metavar="BYTES")] = (
        200 * 1024 * 1024
    )
    tenant_files: Annotated[int, Setting("Most files and open uploads of a tenant.", least=1)] = 10_000
    tenant_file_bytes: Annotated[int, Setting("Most bytes in files of a tenant.", least=1, metavar="BYTES")] = (
        10 * 1024 * 1024 * 1024
    )
    tenant_jobs: Annotated[int, Setting("Most queued stored jobs of a tenant; 0: no limit.", least=0)] = 500_000
    tenant_job_bytes: Annotated[int, Setting("Most bytes in them; 0: no limit.", least=0, metavar="BYTES")] = 0
    tenant_job_tokens: Annotated[
        int, Setting("Most prompt tokens in them, estimated at four bytes a token; 0: no limit.", least=0)
    ] = 0
    metrics_tenants: Annotated[
        int,
        Setting("Most tenants with metrics of their own; others share one series.", least=0, most=10_000),
    ] = 100
    media_redirects: Annotated[int, Setting("Redirects followed for a media URL.", least=0, most=20)] = 3
    namespace: str = "default"  # models of other namespaces are not served here
    api_key: Sequence[str] = field(default=(), repr=False)  # given by the operator, beside those in the store

    @property
    def asks_for_keys(self) -> bool:
        """Return True if no request is answered without a key, whether or not any is stored."""
        return self.auth == "keys" or bool(self.api_key) or self.jwt_keys is not None

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.deadline_s > self.max_deadline_s:
            raise ValueError(f"deadline_s ({self.deadline_s}) must not exceed max_deadline_s ({self.max_deadline_s})")
        if self.tls_key is not None and self.tls_cert is None:
            raise ValueError("tls_key needs tls_cert")
        if self.jwt_keys is not None and not (self.jwt_issuer and self.jwt_audience):
            raise ValueError("jwt_keys needs jwt_issuer and jwt_audience, or tokens for other services would be taken")
        for name in self.audit_leave_out:
            if name not in AUDIT_LEAVABLE:
                raise ValueError(f"audit_leave_out: {name!r} is none of {', '.join(AUDIT_LEAVABLE)}")
        for origin in self.cors_origins:
            if not _ORIGIN.match(origin):
                raise ValueError(f"cors_origins: {origin!r} is no origin such as https://app.example, without a path or *")
