"""Settings of the HTTP frontend."""

from __future__ import annotations

from headrace.catalogue.setting import PORT, Command, Setting

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
