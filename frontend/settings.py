"""What can be set on the HTTP surface. Durations in seconds, sizes in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

MAY_BE_ZERO = frozenset(
    {
        "drain_grace_s",
        "max_pipelined",
        "media_redirects",
        "port",
        "prompt_cache_bytes",
        "sse_gather_s",
        "sse_keepalive_s",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendSettings:
    """Checked once, at construction. Raises ValueError naming the setting."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0 = any free port
    backlog: int = 2048
    keep_alive_s: float = 75.0  # an idle connection is closed after this
    body_timeout_s: float = 30.0  # from the headers to the last byte of the body
    max_body_bytes: int = 32 * 1024 * 1024
    deadline_s: float = 600.0  # of a request that names none
    max_deadline_s: float = 3600.0  # longer wishes are cut to this
    max_choices: int = 128  # n times the number of prompts
    max_inputs: int = 2048  # of one request for embeddings, scores or classes
    job_inputs: int = 16  # at most so many of them go to one worker as one job …
    job_input_tokens: int = 8192  # … with so many tokens, if it is more than one
    sse_gather_s: float = 0.008  # most that an event waits for others of a fast stream, with many streams; 0 = none wait
    sse_keepalive_s: float = 0.0  # a comment line on a stream silent for this long; 0 = none
    slow_client_s: float = 60.0  # an answer of which the client takes nothing for so long is cut
    inline_prompt_bytes: int = 8192  # longer prompts are tokenised in a thread
    tokenizer_threads: int = 2
    fast_tokenizer: bool = True  # encode by a second library, where it agrees with the one that defines the ids
    prompt_cache_bytes: int = 64 * 1024 * 1024  # of what long prompts have in common with later ones; 0 = none
    drain_grace_s: float = 30.0  # how long running answers may go on after SIGTERM
    start_timeout_s: float = 30.0  # how long to wait for a NATS server that is not there yet
    access_log: bool = True
    # connections
    max_connections: int = 4096  # at the limit idle ones are closed for new ones, and without idle ones these are refused
    header_timeout_s: float = 20.0  # from the first byte of a request (or the connection) to the end of its headers
    max_header_bytes: int = 64 * 1024  # request line and headers
    max_pipelined: int = 16  # requests on one connection that wait for the one before them
    cors_origins: Sequence[str] = ()  # web pages from there may call this server from a browser; "*" = from anywhere
    # request bodies
    max_json_depth: int = 64
    max_json_values: int = 1_200_000  # a prompt of a million token ids fits
    max_json_containers: int = 100_000  # lists, objects and members of objects
    # images, videos and sounds
    media_fetch: bool = True  # off: only bytes that come with the request
    media_domains: Sequence[str] = ()  # fetch only from these and from what is below them; empty = from anywhere
    media_private: bool = False  # fetch from private, link-local and loopback addresses as well
    media_max_bytes: int = 20 * 1024 * 1024  # of one item
    media_max_total_bytes: int = 48 * 1024 * 1024  # of all items of a request
    media_max_items: int = 16
    media_timeout_s: float = 15.0  # from a URL to its last byte
    media_fetches: int = 16  # at once, of all requests
    media_redirects: int = 3
    # the Responses API and Anthropic's
    response_ttl_s: float = 30 * 86_400.0  # how long a stored response can be continued
    response_max_bytes: int = 8 * 1024 * 1024  # of one stored turn; a larger one is answered but not stored
    response_max_turns: int = 512  # of a conversation continued by previous_response_id
    response_store_s: float = 2.0  # how long an answer waits until it is stored
    adapter_routes: bool = False  # adapters can be loaded and unloaded over HTTP: clients then name folders on workers
    strip_billing_header: bool = True  # drop the line in system prompts that differs in every request of Claude Code
    namespace: str = "default"  # models of other namespaces are not served here

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self)):
            value = getattr(self, name)
            may_be_zero = name in MAY_BE_ZERO
            if (
                isinstance(value, (int, float))
                and not isinstance(value, bool)
                and (value < 0 or (value == 0 and not may_be_zero))
            ):
                raise ValueError(f"{name} must be {'0 or more' if may_be_zero else 'above 0'}, got {value}")
        if self.port > 65535:
            raise ValueError(f"port must be at most 65535, got {self.port}")
        if self.deadline_s > self.max_deadline_s:
            raise ValueError(f"deadline_s ({self.deadline_s}) must not exceed max_deadline_s ({self.max_deadline_s})")
