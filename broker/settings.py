"""Times and limits of the job protocol, in one place. The defaults are what `docs/reliability.md` promises."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Durations in seconds. `lease_ttl_s` and `ack_wait_s` must be the same in every process of a deployment."""

    lease_ttl_s: float = 4.0
    ack_wait_s: float = 3.0  # of REQ and WORK; claims are extended every third of it
    resend_s: float = 0.5  # an unanswered last frame is sent again
    silence_s: float = 1.5  # an open stream without a frame is asked after
    rpc_timeout_s: float = 1.0
    retry_s: float = 0.2
    janitor_s: float = 1.0
    alone_patience_s: float = 0.25  # so long a job in its last life waits for its neighbours, then they may be moved
    tombstone_s: float = 60.0
    publish_timeout_s: float = 2.0
    load_period_s: float = 0.2
    load_gap_s: float = 0.005  # least distance of two load reports; a change is reported at once otherwise
    ttl_slack_s: float = 5.0  # Nats-TTL outlives the deadline by this: it is garbage collection, never the deadline itself


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressSettings:
    """What one ingress allows."""

    timing: Timing = field(default_factory=Timing)
    max_open: int = 10_000  # open requests; more are refused with Overloaded
    max_rows: int = 4096  # rows waiting for one reader before its stream is paused
    gather_s: float = 0.008  # most that what a stream gets soon after its last rows waits for more; 0 = nothing waits
    slow_client_s: float = 60.0  # a paused stream that is not read for so long is cut
    spill_bytes: int = 512 * 1024  # larger payloads go to the object store
    max_payload_bytes: int = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """What one worker session does."""

    timing: Timing = field(default_factory=Timing)
    slots: int = 64
    max_frame_bytes: int = 512 * 1024
    max_attempts: int = 8  # moves for retriable engine errors, per generation, before the job ends as failed
    parked_tokens: int = 4096  # tokens a choice may run ahead while the lease is lost, before its sequence is parked
    drain_grace_s: float = 60.0
    prefill_budget_tokens: int = 16_384  # what a prefill worker takes at once
    self_place: bool = True
    self_place_burst: int = 16  # requests a worker may be placing on itself at once, within its free slots
