"""Adds the commands that query or control running workers and routers to the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from headrace.cli.adapters import add_adapter_commands
from headrace.cli.operations import add_operations
from headrace.commands.running_deployment import located_settings
from headrace.config.flags import add_setting_flags
from headrace.config.options import find

ROLE_EXAMPLES = """examples:
  headrace worker role worker-2 prefill
  headrace worker role prefill-1 decode --grace 10 --nats nats://broker:4222

Returns when the worker serves in its new role. What it cannot finish within --grace goes on elsewhere. Only roles that its
engine was started for are possible: `headrace worker status` shows them."""

DRAIN_EXAMPLES = """example:
  headrace worker drain worker-1 --grace 120 --nats nats://broker:4222

Returns when the worker has accepted, with --wait when it has left. Its process ends with code 0 when its work is done or handed
over."""

EXPLAIN_EXAMPLES = """example:
  headrace router explain 68a1f0c2… --nats nats://broker:4222

The id is the one of the answer (`id` without its prefix `chatcmpl-` or `cmpl-`, which may stay). Asks every live router; each
remembers its last decisions only."""


def add_worker_commands(worker: argparse.ArgumentParser) -> None:
    """Add `status`, `drain`, `role`, `adapter` and the operations of one engine below `headrace worker`."""
    actions = worker.add_subparsers(metavar="", title="other worker commands")
    status = _add(
        actions, "worker status", _run_worker_status, help="show the workers that run", description="Show every live worker."
    )
    status.add_argument("--json", action="store_true", help="as JSON")
    drain = _add(
        actions,
        "worker drain",
        _run_drain,
        help="ask a worker to finish its work and leave",
        description="Ask a worker to stop claiming, to finish or hand over its work, and to leave.",
        epilog=DRAIN_EXAMPLES,
    )
    drain.add_argument("worker", metavar="ID", help="id or name of the worker")
    drain.add_argument(
        "--grace",
        type=float,
        metavar="SECONDS",
        help="how long it may take to finish (default: the worker's own drain_grace_s)",
    )
    drain.add_argument("--wait", action="store_true", help="return when it has left, and show how far it is")
    role = _add(
        actions,
        "worker role",
        _run_role,
        help="give a worker another role",
        description="Ask a worker to finish or hand over the work of its present role and to serve another one.",
        epilog=ROLE_EXAMPLES,
    )
    add_adapter_commands(actions)
    add_operations(actions)
    role.add_argument("worker", metavar="ID", help="id or name of the worker")
    known = find("worker.role")
    role.add_argument("role", metavar="ROLE", choices=known and known.choices, help="aggregated, prefill or decode")
    role.add_argument(
        "--grace",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="how long it may take to finish; what runs then is handed over (default: 60)",
    )


def add_router_questions(router: argparse.ArgumentParser) -> None:
    """Add `explain` and `status` below `headrace router`."""
    actions = router.add_subparsers(metavar="", title="other router commands")
    explain = _add(
        actions,
        "router explain",
        _run_explain,
        help="say why a request was placed where it is",
        description="Ask all live routers about one request and show the candidates, their costs and the choice.",
        epilog=EXPLAIN_EXAMPLES,
    )
    explain.add_argument("request", metavar="REQUEST-ID", help="id of the request")
    status = _add(
        actions,
        "router status",
        _run_router_status,
        help="show the routers that run",
        description="Show every live router, its pool and what it holds.",
    )
    for parser in (explain, status):
        parser.add_argument("--json", action="store_true", help="as JSON")


def _add(actions: Any, name: str, run: Callable[[argparse.Namespace], int], **shown: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name.rpartition(" ")[2], formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **shown
    )
    add_setting_flags(parser, "control")
    parser.set_defaults(run=run, prog=f"headrace {name}")
    return parser


def _run_worker_status(parsed: argparse.Namespace) -> int:
    from headrace.commands.operating.control import show_workers

    return show_workers(located_settings(parsed), as_json=parsed.json)


def _run_drain(parsed: argparse.Namespace) -> int:
    from headrace.commands.operating.control import drain_worker

    return drain_worker(located_settings(parsed), parsed.worker, grace_s=parsed.grace, wait=parsed.wait)


def _run_role(parsed: argparse.Namespace) -> int:
    from headrace.commands.operating.control import change_role

    return change_role(located_settings(parsed), parsed.worker, parsed.role, grace_s=parsed.grace)


def _run_explain(parsed: argparse.Namespace) -> int:
    from headrace.commands.explain import explain_request

    return explain_request(located_settings(parsed), parsed.request, as_json=parsed.json)


def _run_router_status(parsed: argparse.Namespace) -> int:
    from headrace.commands.explain import show_routers

    return show_routers(located_settings(parsed), as_json=parsed.json)
