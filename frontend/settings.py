"""What can be set on the HTTP surface. Durations in seconds, sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass, fields


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
    sse_keepalive_s: float = 0.0  # a comment line on a stream silent for this long; 0 = none
    inline_prompt_bytes: int = 8192  # longer prompts are tokenised in a thread
    tokenizer_threads: int = 2
    drain_grace_s: float = 30.0  # how long running answers may go on after SIGTERM
    start_timeout_s: float = 30.0  # how long to wait for a NATS server that is not there yet
    access_log: bool = True
    namespace: str = "default"  # models of other namespaces are not served here

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self)):
            value = getattr(self, name)
            may_be_zero = name in ("port", "sse_keepalive_s", "drain_grace_s")
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
