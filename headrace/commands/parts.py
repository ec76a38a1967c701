"""The commands of workers and routers, the operations of an engine, and the commands that start a part of a deployment."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from headrace.base.errors import EXIT_FAILURE, EXIT_OK, CommandError, StartFailed
from headrace.broker.codec import decode, encode
from headrace.broker.messages.operator import (
    CheckHealth,
    Operated,
    Pause,
    Profile,
    ResetCache,
    Resume,
    SetLogLevel,
    Sleep,
    Wake,
    WorkerCommand,
)
from headrace.commands.adapter import add_adapter_commands
from headrace.commands.control import (
    check_grace,
    connected,
    find_worker,
    how_far,
    live_workers,
    located_settings,
    part_settings,
)
from headrace.commands.groups import EXIT_CODES, add_group, add_help_flags
from headrace.commands.progress import told_while
from headrace.config.build_settings import add_setting_flags, read_settings
from headrace.config.options import Command, find
from headrace.config.settings import Settings
from headrace.jetstream.errors import NoResponder, RequestTimeout
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects

_MARGIN_S = 15.0  # for what the grace period leaves over, and for the way there and back
_ENGINE_S = 150.0  # what an engine may take for an operation, and a little
_LOAD_S = 1000.0  # waking, where weights are read again and the engine is warmed up
_PATIENCE_S: dict[type[WorkerCommand], float] = {Wake: _LOAD_S, SetLogLevel: _MARGIN_S}


def show_health(settings: Settings, worker: str, *, canary: bool, timeout_s: float, as_json: bool) -> int:
    """Run `headrace worker health`. The exit code is 1 for a worker that is not healthy."""
    if not 0 < timeout_s < float("inf"):
        raise CommandError(f"--timeout must be above 0 seconds, got {timeout_s:g}")
    command = CheckHealth(canary=canary, timeout_s=timeout_s)
    told, answer = _ask(settings, worker, command, name="health", patience_s=timeout_s + _MARGIN_S)
    if as_json:
        sys.stdout.write(json.dumps({"worker": told, "healthy": answer.ok, **answer.report}, indent=1) + "\n")
    else:
        sys.stdout.write(f"{answer.message}\n{_lines(answer.report)}")
    return EXIT_OK if answer.ok else EXIT_FAILURE


def sleep_worker(settings: Settings, worker: str, *, level: int, grace_s: float | None) -> int:
    """Run `headrace worker sleep` and return when it sleeps. Raises CommandError."""
    if grace_s is not None:
        check_grace(grace_s)
    # without a grace period it is the worker's own, which may be anything
    patience_s = _ENGINE_S + (3600.0 if grace_s is None else grace_s)
    return _tell(settings, worker, Sleep(level=level, grace_s=grace_s), name="sleep", patience_s=patience_s)


def wake_worker(settings: Settings, worker: str) -> int:
    """Run `headrace worker wake` and return when it takes requests. Raises CommandError."""
    return _tell(settings, worker, Wake(), name="wake")


def pause_worker(settings: Settings, worker: str, *, grace_s: float | None) -> int:
    """Run `headrace worker pause` and return when its engine stands still. Raises CommandError."""
    if grace_s is not None:
        check_grace(grace_s)
    return _tell(settings, worker, Pause(grace_s=grace_s), name="pause", patience_s=_ENGINE_S + (grace_s or 0.0))


def resume_worker(settings: Settings, worker: str) -> int:
    """Run `headrace worker resume`. Raises CommandError."""
    return _tell(settings, worker, Resume(), name="resume")


def reset_cache(settings: Settings, worker: str) -> int:
    """Run `headrace worker reset-cache`. Raises CommandError."""
    return _tell(settings, worker, ResetCache(), name="reset-cache")


def profile_worker(settings: Settings, worker: str, action: Any) -> int:
    """Run `headrace worker profile start` or `stop`. Raises CommandError."""
    return _tell(settings, worker, Profile(action=action), name=f"profile {action}")


def set_log_level(settings: Settings, worker: str, level: str) -> int:
    """Run `headrace worker log-level`. Raises CommandError."""
    return _tell(settings, worker, SetLogLevel(level=level), name="log-level")


def _tell(settings: Settings, worker: str, command: WorkerCommand, *, name: str, patience_s: float | None = None) -> int:
    """Have a worker do this, and print what it says. Raises CommandError with its reason when it refuses."""
    patience_s = patience_s if patience_s is not None else _PATIENCE_S.get(type(command), _ENGINE_S)
    told, answer = _ask(settings, worker, command, name=name, patience_s=patience_s)
    if not answer.ok:
        raise CommandError(f"worker {told} refused: {answer.message}")
    sys.stdout.write(f"{answer.message}\n{_lines(answer.report)}")
    return EXIT_OK


def _ask(settings: Settings, wanted: str, command: WorkerCommand, *, name: str, patience_s: float) -> tuple[str, Operated]:
    """Send a command to a worker and return the worker's id and answer. Raises CommandError when there is none."""

    async def ask(messaging: Messaging, names: Subjects) -> tuple[str, Operated]:
        member = find_worker(wanted, await live_workers(messaging, names))
        subject = names.operate_worker(member.pool, member.worker)
        try:
            asked = messaging.request(subject, encode(command), timeout_s=patience_s)
            what = f"worker {member.worker}: {name}"
            answer = await told_while(asked, what, lambda: how_far(messaging, names, member.worker))
        except NoResponder:
            raise StartFailed(
                f"worker {member.worker} does not answer: it has just left, cannot reach the NATS server, or is of a "
                "version without this command"
            ) from None
        except RequestTimeout:
            raise StartFailed(
                f"worker {member.worker} has not answered within {patience_s:g} s; what became of it: headrace worker status"
            ) from None
        return member.worker, decode(Operated, answer)

    return connected(settings, ask, name=f"headrace worker {name}")


def _lines(report: dict[str, Any]) -> str:
    shown = {name: json.dumps(value) if isinstance(value, dict | list) else value for name, value in report.items()}
    width = max(map(len, shown), default=0)
    return "".join(f"  {name.ljust(width)}  {_readable(name, value)}\n" for name, value in shown.items())


def _readable(name: str, value: Any) -> str:
    if "bytes" in name and isinstance(value, int):
        return f"{value / 2**20:,.1f} MiB"
    if name.endswith("_s"):
        return f"{value:g} s"
    return str(value)


HEALTH_EXAMPLES = """examples:
  headrace worker health worker-1
  headrace worker health worker-1 --json --timeout 2

The engine is asked for one token unless it sleeps or is paused. Exit codes: 0 healthy, 1 not, or no answer."""

SLEEP_EXAMPLES = """examples:
  headrace worker sleep worker-1
  headrace worker sleep worker-1 --level 2 --grace 5

Takes nothing new, finishes or hands over its work, and then has the engine free its memory; what was freed is measured. Its
process and its place among the workers stay. `headrace worker wake`, or a router with --wake-on-demand, ends the sleep. On a
GPU vLLM needs --engine-arg enable_sleep_mode=true."""

PAUSE_EXAMPLES = """examples:
  headrace worker pause worker-1
  headrace worker pause worker-1 --grace 30

Without --grace running answers stand still and go on at `headrace worker resume`; their deadlines do not wait."""

PROFILE_EXAMPLES = """examples:
  headrace worker profile start worker-1
  headrace worker profile stop worker-1

vLLM needs --engine-arg 'profiler_config={"profiler": "torch", "torch_profiler_dir": "FOLDER"}', the simulator
--engine-arg profile_dir=FOLDER."""

LEVELS = ("debug", "info", "warning", "error")


def add_operations(actions: Any) -> None:
    health = _add_operation(
        actions, "worker health", _health, "ask a worker, and its engine, whether it can serve", HEALTH_EXAMPLES
    )
    health.add_argument("--no-canary", action="store_true", help="do not ask the engine for a token")
    health.add_argument("--timeout", type=float, default=10.0, metavar="SECONDS", help="for the engine's answer (default: 10)")
    health.add_argument("--json", action="store_true", help="as JSON")
    sleep = _add_operation(actions, "worker sleep", _sleep, "have a worker finish and free its engine's memory", SLEEP_EXAMPLES)
    sleep.add_argument("--level", type=int, default=1, metavar="N", help="1: weights stay on the host; 2: they are dropped")
    _grace(sleep, "how long its work may take to finish; the rest goes on elsewhere (default: the worker's drain_grace_s)")
    _add_operation(actions, "worker wake", _wake, "end a worker's sleep")
    pause = _add_operation(actions, "worker pause", _pause, "have a worker stand still", PAUSE_EXAMPLES)
    _grace(pause, "finish its answers first, for so long; the rest goes on elsewhere (default: they stand still with it)")
    _add_operation(actions, "worker resume", _resume, "end a worker's pause")
    _add_operation(actions, "worker reset-cache", _reset_cache, "empty the prefix cache of a worker's engine")
    described = "Start the profiler of a worker's engine, or stop it and have it write down what it has seen."
    ways = add_group(
        actions, "worker profile", about="profile a worker's engine", description=described, examples=PROFILE_EXAMPLES
    )
    for action in ("start", "stop"):
        _add_operation(ways, f"worker profile {action}", _profile, f"{action} the profiler").set_defaults(action=action)
    level = _add_operation(actions, "worker log-level", _log_level, "change the level from which a worker logs")
    level.add_argument("level", choices=LEVELS, help=", ".join(LEVELS))


def _add_operation(
    actions: Any, name: str, run: Callable[[argparse.Namespace], int], text: str, epilog: str | None = None
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name.rpartition(" ")[2],
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_setting_flags(parser, "control")
    parser.add_argument("worker", metavar="ID", help="id or name of the worker")
    parser.set_defaults(run=run, prog=f"headrace {name}")
    return parser


def _grace(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--grace", type=float, metavar="SECONDS", help=text)


def _health(parsed: argparse.Namespace) -> int:

    settings = located_settings(parsed)
    return show_health(settings, parsed.worker, canary=not parsed.no_canary, timeout_s=parsed.timeout, as_json=parsed.json)


def _sleep(parsed: argparse.Namespace) -> int:

    return sleep_worker(located_settings(parsed), parsed.worker, level=parsed.level, grace_s=parsed.grace)


def _wake(parsed: argparse.Namespace) -> int:

    return wake_worker(located_settings(parsed), parsed.worker)


def _pause(parsed: argparse.Namespace) -> int:

    return pause_worker(located_settings(parsed), parsed.worker, grace_s=parsed.grace)


def _resume(parsed: argparse.Namespace) -> int:

    return resume_worker(located_settings(parsed), parsed.worker)


def _reset_cache(parsed: argparse.Namespace) -> int:

    return reset_cache(located_settings(parsed), parsed.worker)


def _profile(parsed: argparse.Namespace) -> int:

    return profile_worker(located_settings(parsed), parsed.worker, parsed.action)


def _log_level(parsed: argparse.Namespace) -> int:

    return set_log_level(located_settings(parsed), parsed.worker, parsed.level)


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
    actions = worker.add_subparsers(metavar="", title="other worker commands")
    status = _add_question(
        actions, "worker status", _run_worker_status, help="show the workers that run", description="Show every live worker."
    )
    status.add_argument("--json", action="store_true", help="as JSON")
    drain = _add_question(
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
    role = _add_question(
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
    actions = router.add_subparsers(metavar="", title="other router commands")
    explain = _add_question(
        actions,
        "router explain",
        _run_explain,
        help="say why a request was placed where it is",
        description="Ask all live routers about one request and show the candidates, their costs and the choice.",
        epilog=EXPLAIN_EXAMPLES,
    )
    explain.add_argument("request", metavar="REQUEST-ID", help="id of the request")
    status = _add_question(
        actions,
        "router status",
        _run_router_status,
        help="show the routers that run",
        description="Show every live router, its pool and what it holds.",
    )
    for parser in (explain, status):
        parser.add_argument("--json", action="store_true", help="as JSON")


def _add_question(actions: Any, name: str, run: Callable[[argparse.Namespace], int], **shown: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name.rpartition(" ")[2], formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **shown
    )
    add_setting_flags(parser, "control")
    parser.set_defaults(run=run, prog=f"headrace {name}")
    return parser


def _run_worker_status(parsed: argparse.Namespace) -> int:
    from headrace.commands.control import show_workers

    return show_workers(located_settings(parsed), as_json=parsed.json)


def _run_drain(parsed: argparse.Namespace) -> int:
    from headrace.commands.control import drain_worker

    return drain_worker(located_settings(parsed), parsed.worker, grace_s=parsed.grace, wait=parsed.wait)


def _run_role(parsed: argparse.Namespace) -> int:
    from headrace.commands.control import change_role

    return change_role(located_settings(parsed), parsed.worker, parsed.role, grace_s=parsed.grace)


def _run_explain(parsed: argparse.Namespace) -> int:
    from headrace.commands.trace import explain_request

    return explain_request(located_settings(parsed), parsed.request, as_json=parsed.json)


def _run_router_status(parsed: argparse.Namespace) -> int:
    from headrace.commands.trace import show_routers

    return show_routers(located_settings(parsed), as_json=parsed.json)


# The options that `--help` shows; `--help-all` shows the others too.
_USUAL = {
    "up": "--config --data-dir --nats --verbose --mode --workers --prefill-workers --decode-workers --routers --grace --host "
    "--port --engine --model --served-name --slots --engine-arg",
    "frontend": "--config --nats --host --port --deadline --max-body --drain-grace --log-level",
    "worker": "--config --data-dir --nats --engine --model --served-name --name --role --slots --engine-arg --tool-parser "
    "--reasoning-parser --drain-grace --metrics-port",
    "router": "--config --nats --name --model --window --policy --router-metrics-port --drain-grace",
}
USUAL = {command: frozenset(flags.split()) for command, flags in _USUAL.items()}

UP_EXAMPLES = """examples:
  headrace up
  headrace up --engine sim --workers 4 --port 0
  headrace up --mode disagg --prefill-workers 2 --decode-workers 2
  headrace up --model ./my-model --engine-arg max_model_len=4096 --engine-arg enforce_eager=true
  headrace up --nats nats://broker:4222           with an existing NATS server

Runs nats-server, one frontend and the workers as processes of their own and restarts what crashes. Ctrl-C stops all of
them and lets workers finish first; a second Ctrl-C kills them. <data-dir>/run/up.json says what runs where."""

FRONTEND_EXAMPLES = """example:
  headrace frontend --nats nats://broker:4222 --host 0.0.0.0 --auth keys

SIGTERM finishes running answers first; a second one, or Ctrl-C, stops at once."""

WORKER_EXAMPLES = """examples:
  headrace worker --engine sim --nats nats://broker:4222
  headrace worker --engine vllm --model Qwen/Qwen3-0.6B --engine-arg gpu_memory_utilization=0.8
  headrace worker --engine sim --role prefill     computes prompts for workers in the role decode
  headrace worker status                          the workers that run, their roles and what they hold
  headrace worker drain worker-1                  ask a worker anywhere to finish and leave
  headrace worker role worker-1 prefill           give it another role
  headrace worker adapter load sql /adapters/sql --model M
  headrace worker health worker-1                 whether it, and its engine, can serve
  headrace worker sleep worker-1                  finish, free the engine's memory, keep the process
  headrace worker wake worker-1

SIGTERM drains: no new work, running work is finished or handed over. A second one, or Ctrl-C, stops at once."""

ROUTER_EXAMPLES = """examples:
  headrace router --nats nats://broker:4222       place the requests of all models
  headrace router --model Qwen/Qwen3-0.6B --window 4096
  headrace router status                          the routers that run, and what they hold
  headrace router explain REQUEST-ID              why a request is where it is

Any number of routers share the work; without one, workers place requests on themselves. SIGTERM finishes what is being
placed, gives the rest back and leaves; a second one, or Ctrl-C twice, stops at once."""


def add_up(commands: Any, about: str) -> None:
    _add(commands, "up", _run_up, about=about, epilog=UP_EXAMPLES)


def add_frontend(commands: Any, about: str) -> None:
    _add(commands, "frontend", _run_frontend, about=about, epilog=FRONTEND_EXAMPLES)


def add_worker(commands: Any, about: str) -> None:
    add_worker_commands(_add(commands, "worker", _run_worker, about=about, epilog=WORKER_EXAMPLES))


def add_router(commands: Any, about: str) -> None:
    add_router_questions(_add(commands, "router", _run_router, about=about, epilog=ROUTER_EXAMPLES))


def _add(
    commands: Any,
    name: Command,
    run: Callable[[argparse.Namespace], int],
    *,
    about: str,
    epilog: str,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=about,
        usage=f"headrace {name} [options]",
        description=about[0].upper() + about[1:] + ".",
        epilog=f"{epilog}\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.set_defaults(run=run, prog=f"headrace {name}")
    add_help_flags(parser, add_setting_flags(parser, name), usual=USUAL[name])
    return parser


def _run_up(parsed: argparse.Namespace) -> int:
    from headrace.commands.run import run_up

    return run_up(read_settings(parsed, "up"))


def _run_frontend(parsed: argparse.Namespace) -> int:
    from headrace.commands.run import run_frontend

    return run_frontend(part_settings(read_settings(parsed, "frontend"), ["ingress"]))


def _run_worker(parsed: argparse.Namespace) -> int:
    from headrace.commands.run import run_worker
    from headrace.up.server_logins import logins_by_hand

    settings = read_settings(parsed, "worker")
    return run_worker(part_settings(settings, logins_by_hand(settings)))


def _run_router(parsed: argparse.Namespace) -> int:
    from headrace.commands.run import run_router

    return run_router(part_settings(read_settings(parsed, "router"), ["router"]))
