"""Defines the times and limits of the job protocol. `docs/reliability.md` promises the defaults."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

CLUSTER_LEASE_S = 12.0  # longer than nats-server takes to elect the leader of the leases, which is 4 to 9 s and fixed in it
BROKER_WAIT_S = 3.0  # longer than a nats-server takes to start again
CLUSTER_BROKER_WAIT_S = 15.0  # longer than nats-server takes to elect, where a first election ends without a leader


def broker_wait_s(copies: int) -> float:
    """Return how long a new request waits by default for a broker that keeps so many copies of what it stores."""
    return BROKER_WAIT_S if copies <= 1 else CLUSTER_BROKER_WAIT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Durations in seconds. `lease_ttl_s` and `ack_wait_s` must be the same in every process of a deployment."""

    lease_ttl_s: float = 4.0
    overdue_s: float = 0.0  # without a renewal, while others renew: a member that is gone before its TTL is over; 0 = never
    ack_wait_s: float = 3.0  # of REQ and WORK; claims are extended every third of it
    resend_s: float = 0.5  # a last frame without an answer is sent again after this time
    silence_s: float = 1.5  # time without a frame after which the pool is asked for a stream's tokens
    rpc_timeout_s: float = 1.0
    retry_s: float = 0.2
    janitor_s: float = 1.0
    trial_patience_s: float = 0.25  # time that a suspect waits for its co-runners to end before they may be moved
    trial_group_s: float = 0.5  # after which a suspect that may have company starts beside those that could not be moved
    trial_alone_s: float = 2.0  # the same for one that is to run alone; doubles with each crash after the third
    tombstone_s: float = 60.0
    publish_timeout_s: float = 2.0
    load_period_s: float = 0.2
    load_gap_s: float = 0.005  # least time between two load reports; otherwise a change is reported at once
    ttl_slack_s: float = 5.0  # Nats-TTL beyond the deadline: it is garbage collection, never the deadline itself

    def at_copies(self, copies: int) -> Self:
        """Return the durations for leases of which a cluster of NATS servers keeps `copies`.

        With several an election of their leader stops all renewals. So they last longer, and a member whose renewals alone
        are missing is gone after the time for which a lease would last otherwise.
        """
        if copies <= 1:
            return self
        return replace(self, lease_ttl_s=max(CLUSTER_LEASE_S, self.lease_ttl_s), overdue_s=self.lease_ttl_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressSettings:
    """Limits of one ingress."""

    timing: Timing = field(default_factory=Timing)
    max_open: int = 10_000  # open requests; more are refused with Overloaded
    max_rows: int = 4096  # rows waiting for one reader before its stream is paused
    gather_s: float = 0.008  # longest that rows which arrive soon after the last ones wait for more; 0 = they do not wait
    broker_wait_s: float = 0.0  # longest wait of a new request while the broker, a leader or the lease is away; 0 = none
    no_worker_wait_s: float = 10.0  # longest wait of a request for a worker while there is none; 0 = refused at once
    slow_client_s: float = 60.0  # a stream that stays paused for so long is ended
    spill_bytes: int = 512 * 1024  # larger payloads go to the object store
    card_key: bytes = field(default=b"", repr=False)  # that must have signed model cards; empty = none need have
    seals: bool = False  # they are encrypted there, because workers of all pools read it
    max_payload_bytes: int = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class CarrierSettings:
    """Limits of one carrier of stored jobs."""

    timing: Timing = field(default_factory=Timing)
    window: int = 1024  # most jobs of one model that it carries at once; twice the pool's slots where that is less
    starting: int = 32  # jobs that are checked and rendered at once
    poll_s: float = 5.0  # between two looks at the ends of what it carries
    entry_gap_s: float = 0.02  # least time between two entries with rows of one durable stream
    entry_rows: int = 256  # most rows of an entry
    retry_s: float = 0.5  # before a submission that was refused is tried again, growing
    longest_retry_s: float = 10.0
    response_bytes: int = 508 * 1024  # larger responses go to the object store
    margin_s: float = 30.0  # time after its deadline at which any process may end a job
    sweep_s: float = 60.0  # between two sweeps of the jobs that have no carrier
    unknown_model_s: float = 60.0  # time after which a job for a model without a card fails


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """Limits of one worker session."""

    timing: Timing = field(default_factory=Timing)
    slots: int = 64
    max_frame_bytes: int = 512 * 1024
    max_attempts: int = 8  # moves for retriable engine errors, per generation, before the job ends as failed
    parked_tokens: int = 4096  # tokens a choice may run ahead while the lease is lost, before its sequence is parked
    drain_grace_s: float = 60.0
    prefill_budget_tokens: int = 16_384  # tokens that a prefill worker accepts at once
    adapter_slots: int = 256  # adapters of a worker: their names travel with every renewal of its lease
    max_preemptions: int = 4  # moves after which a batch run makes way for interactive work no more, per generation
    self_place: bool = True
    self_place_burst: int = 16  # requests that a worker may place on itself at once, within its free slots
