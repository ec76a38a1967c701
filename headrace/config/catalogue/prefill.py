"""Settings of separate prefill and decode: where prompts are computed, and how long each step of a hand-over may take."""

from __future__ import annotations

from headrace.config.catalogue.setting import Command, Setting

_WORKER: tuple[Command, ...] = ("worker",)
_ANY_WORKER: tuple[Command, ...] = ("up", "worker")
_PLACING: tuple[Command, ...] = ("up", "router")

# What the routers decide; `up` gives what is set here to its workers too, for when they have to decide themselves.
PREFILL_DECISION = ("prefill", "prefill_min_tokens", "prefill_unready")

WORKER_PREFILL = (
    Setting(
        "worker.prefill",
        "choice",
        "auto",
        "Where a decode worker has prompts computed when no router has decided: by a prefill worker if it is long, always, or "
        "never.",
        _WORKER,
        "--prefill",
        choices=("auto", "always", "never"),
    ),
    Setting(
        "worker.prefill_min_tokens",
        "integer",
        256,
        "With auto: a prompt of which fewer tokens than this are not in its cache is computed by the decode worker.",
        _WORKER,
        "--prefill-min-tokens",
        least=0,
    ),
    Setting(
        "worker.prefill_unready",
        "choice",
        "local",
        "While no prefill worker is ready, a decode worker computes prompts itself (local) or refuses the request.",
        _WORKER,
        "--prefill-unready",
        choices=("local", "refuse"),
    ),
    Setting(
        "worker.prefill_wait_s",
        "seconds",
        2.0,
        "How long at least a decode worker waits for a prefill worker to take a job; then it computes the prompt itself.",
        _ANY_WORKER,
        "--prefill-wait",
        least=0.01,
        most=3600,
    ),
    Setting(
        "worker.prefill_budget_tokens",
        "integer",
        0,
        "Prompt tokens that a prefill worker takes on at once; 0 is two engine steps.",
        _ANY_WORKER,
        "--prefill-budget",
        least=0,
    ),
    Setting(
        "worker.transfer_timeout_s",
        "seconds",
        10.0,
        "Longest time from the hand-over of a computed prompt to the first token; then the decode worker computes it itself.",
        _ANY_WORKER,
        "--transfer-timeout",
        least=0.1,
        most=3600,
    ),
)

ROUTER_PREFILL = (
    Setting(
        "router.prefill",
        "choice",
        "auto",
        "Whether prefill workers compute prompts for decode workers: when it pays, whenever they can, or never. `up` tells its "
        "workers too.",
        _PLACING,
        "--prefill",
        choices=("auto", "always", "never"),
    ),
    Setting(
        "router.prefill_min_tokens",
        "integer",
        128,
        "With auto: a prompt of which fewer tokens than this are not cached is computed by the worker that answers. `up` tells "
        "its workers too.",
        _PLACING,
        "--prefill-min-tokens",
        least=0,
    ),
    Setting(
        "router.prefill_unready",
        "choice",
        "local",
        "While no prefill worker is ready, prompts are computed by the worker that answers (local), wait, or are refused. `up` "
        "tells its workers too; with wait they keep their own.",
        _PLACING,
        "--prefill-unready",
        choices=("local", "wait", "refuse"),
    ),
)
