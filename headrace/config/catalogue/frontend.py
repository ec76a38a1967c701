"""Settings of the HTTP frontend."""

from __future__ import annotations

from headrace.config.catalogue.setting import PORT, Command, Setting

_HTTP: tuple[Command, ...] = ("up", "frontend")
_HTTP_ONLY: tuple[Command, ...] = ("frontend",)

FRONTEND = (
    Setting("frontend.host", "text", "127.0.0.1", "Address to listen on.", _HTTP, "--host"),
    Setting("frontend.port", "integer", 8000, "Port to listen on; 0 picks a free one.", _HTTP, "--port", **PORT),
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
    Setting("frontend.max_inputs", "integer", 2048, "Most inputs of an embeddings, score or class request.", _HTTP, least=1),
    Setting("frontend.job_inputs", "integer", 16, "Inputs of one job; a request with more is split.", _HTTP, least=1),
    Setting("frontend.job_input_tokens", "integer", 8192, "Tokens of such a job if it has several inputs.", _HTTP, least=1),
    Setting(
        "frontend.sse_gather_s",
        "seconds",
        0.008,
        "Most that an event of a fast stream waits for the next ones, with 160 streams; less with fewer; 0: none waits.",
        _HTTP,
        least=0,
    ),
    Setting(
        "frontend.sse_keepalive_s",
        "seconds",
        0.0,
        "A comment line on a stream that was silent this long; 0 sends none.",
        _HTTP,
        least=0,
    ),
    Setting(
        "frontend.slow_client_s",
        "seconds",
        60.0,
        "An answer of which the client takes nothing for so long is cut, with a reason.",
        _HTTP,
        least=0.1,
    ),
    Setting(
        "frontend.inline_prompt_bytes", "integer", 8192, "Prompts longer than this are tokenised in a thread.", _HTTP, least=1
    ),
    Setting(
        "frontend.prompt_cache_bytes",
        "integer",
        64 * 1024 * 1024,
        "Memory for what long prompts have in common with later ones; 0 = none.",
        _HTTP,
        least=0,
        metavar="BYTES",
    ),
    Setting("frontend.tokenizer_threads", "integer", 2, "Threads for long prompts.", _HTTP, least=1, most=256),
    Setting(
        "frontend.fast_tokenizer",
        "switch",
        True,
        "Encode by fastokens where it gives the same ids: sooner, for some 60 MB per model.",
        _HTTP,
        "--fast-tokenizer",
    ),
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
    # connections and bodies
    Setting(
        "frontend.max_connections",
        "integer",
        4096,
        "Most connections; at the limit idle ones are closed for new ones.",
        _HTTP,
        least=1,
    ),
    Setting(
        "frontend.header_timeout_s",
        "seconds",
        20.0,
        "Longest time a client may take to send a request's headers.",
        _HTTP,
        least=0.1,
    ),
    Setting("frontend.max_header_bytes", "integer", 64 * 1024, "Largest request line and headers.", _HTTP, least=1024),
    Setting("frontend.max_pipelined", "integer", 16, "Requests that may wait on one connection.", _HTTP, least=0),
    Setting(
        "frontend.cors_origins",
        "list",
        (),
        "Origins of web pages that may call this server from a browser; * for all.",
        _HTTP,
        metavar="ORIGIN,…",
    ),
    Setting("frontend.max_json_depth", "integer", 64, "Deepest nesting of a request body.", _HTTP, least=8, most=200),
    Setting("frontend.max_json_values", "integer", 1_200_000, "Most values in a request body.", _HTTP, least=1000),
    Setting(
        "frontend.max_json_containers",
        "integer",
        100_000,
        "Most lists, objects and members of objects in a request body.",
        _HTTP,
        least=1000,
    ),
    # images, videos and sounds
    Setting(
        "frontend.media_fetch", "switch", True, "Fetch images, videos and sounds from URLs in requests.", _HTTP, "--media-fetch"
    ),
    Setting(
        "frontend.media_domains",
        "list",
        (),
        "Fetch media only from these domains and what is below them.",
        _HTTP,
        metavar="DOMAIN,…",
    ),
    Setting(
        "frontend.media_private", "switch", False, "Fetch media from private and loopback addresses, too: for tests.", _HTTP
    ),
    Setting("frontend.media_max_bytes", "integer", 20 * 1024 * 1024, "Largest media item.", _HTTP, least=1, metavar="BYTES"),
    Setting(
        "frontend.media_max_total_bytes",
        "integer",
        48 * 1024 * 1024,
        "Largest size of all media items of a request together.",
        _HTTP,
        least=1,
        metavar="BYTES",
    ),
    Setting("frontend.media_max_items", "integer", 16, "Most media items in a request.", _HTTP, least=1),
    Setting("frontend.media_timeout_s", "seconds", 15.0, "Longest time from a media URL to its last byte.", _HTTP, least=0.1),
    Setting("frontend.media_fetches", "integer", 16, "Media URLs fetched at once, of all requests.", _HTTP, least=1, most=256),
    # the Responses API and Anthropic's
    Setting(
        "frontend.response_ttl_s",
        "seconds",
        30 * 86_400.0,
        "How long a stored response can be read and continued.",
        _HTTP,
        "--response-ttl",
        least=1,
    ),
    Setting(
        "frontend.response_max_bytes",
        "integer",
        8 * 1024 * 1024,
        "Largest turn that is stored; a larger one is answered but not stored.",
        _HTTP,
        least=1024,
        metavar="BYTES",
    ),
    Setting("frontend.response_max_turns", "integer", 512, "Longest conversation by previous_response_id.", _HTTP, least=1),
    Setting("frontend.response_store_s", "seconds", 2.0, "Longest wait of an answer until it is stored.", _HTTP, least=0.1),
    Setting(
        "frontend.adapter_routes",
        "switch",
        False,
        "Let clients load and unload adapters, naming folders on the workers: /v1/load_lora_adapter, /v1/unload_lora_adapter.",
        _HTTP,
        "--adapter-routes",
    ),
    Setting(
        "frontend.strip_billing_header",
        "switch",
        True,
        "Drop the line in system prompts that differs in every request of Claude Code and would defeat prefix caching.",
        _HTTP,
        "--strip-billing-header",
    ),
    Setting("frontend.media_redirects", "integer", 3, "Redirects followed for a media URL.", _HTTP, least=0, most=20),
)
