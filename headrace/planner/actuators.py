"""Does what a plan says: roles, waking and draining by commands to workers, starts by a supervisor, a command or Kubernetes."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
from collections.abc import Awaitable, Callable, Sequence

import structlog
from msgspec.structs import replace

from headrace.base.errors import CommandError
from headrace.base.metrics import Counter, Gauge
from headrace.broker.codec import decode, encode
from headrace.broker.messages.control import Done, Drain
from headrace.broker.messages.operator import Operated, Wake
from headrace.broker.messages.prefill import SetRole
from headrace.broker.messages.requests import Record
from headrace.commands.control import announce, find_worker, live_workers
from headrace.jetstream.errors import JetStreamError, RequestTimeout
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects
from headrace.planner.plan import REASONS, Action, Plan
from headrace.up.worker_plan import ask_for_worker

DESIRED = Gauge("headrace_planner_desired_workers", "Workers that the planner wants", ["pool", "role"])
SUPPLY = Gauge("headrace_planner_supply_workers", "Workers that serve or are on their way", ["pool", "role"])
NEEDED = Gauge("headrace_planner_needed_workers", "Workers that the load needs, before bounds and hysteresis", ["pool", "role"])
CAPACITY = Gauge(
    "headrace_planner_capacity_requests_per_second", "Requests that one worker takes within targets", ["pool", "role"]
)
RATE = Gauge("headrace_planner_arrivals_per_second", "Requests that arrived lately", ["pool"])
FORECAST = Gauge(
    "headrace_planner_forecast_per_second",
    "Requests expected when a worker that is started now can serve; `bound`: low, value, high",
    ["pool", "bound"],
)
CONFIDENCE = Gauge("headrace_planner_confidence", "Quantile of the forecast that workers are planned for", ["pool"])
START_S = Gauge("headrace_planner_start_seconds", "90 % quantile of what starting a worker took", ["pool"])
TICKS = Counter("headrace_planner_ticks_total", "Decisions, by their one reason", ["pool", "reason"])
ACTIONS = Counter("headrace_planner_actions_total", "Actions by kind and by what became of them", ["kind", "outcome"])
LOST_STARTS = Gauge("headrace_planner_lost_starts", "Starts that were asked for and never became a worker", ["pool"])
FAILED_FORECASTS = Gauge("headrace_planner_failed_forecasts", "Forecasters that raised", ["pool", "forecaster"])
FORECAST_LOSS = Gauge(
    "headrace_planner_forecast_loss",
    "Mean loss of a forecaster at the horizon, in square roots of requests a second: the least one's is used",
    ["pool", "forecaster"],
)
LEADING = Gauge("headrace_planner_leading", "1 while this process decides")


def show(plan: Plan) -> None:
    pool = plan.pool
    for reason in REASONS:  # all are series from the beginning, so that you can ask for a rate of them
        TICKS.labels(pool, reason)
    for role, count in plan.desired.items():
        DESIRED.labels(pool, role).set(count)
        SUPPLY.labels(pool, role).set(plan.supply.get(role, 0))
    for role, count in plan.needed.items():
        NEEDED.labels(pool, role).set(count)
    for role, per_s in plan.capacity.items():
        CAPACITY.labels(pool, role).set(per_s)
    if plan.rate is not None:
        RATE.labels(pool).set(plan.rate)
    for bound, value in (("low", plan.forecast_low), ("value", plan.forecast), ("high", plan.forecast_high)):
        if value is not None:
            FORECAST.labels(pool, bound).set(value)
    CONFIDENCE.labels(pool).set(plan.confidence)
    START_S.labels(pool).set(plan.start_s)
    TICKS.labels(pool, plan.reason).inc()


log = structlog.get_logger()

ACCEPTED_S = 3.0  # for a worker to accept a command
ROLE_GRACE_S = 30.0  # for its requests before a worker changes its role
COMMAND_S = 15.0


Starter = Callable[[Plan, str], Awaitable[str]]  # starts a worker of a role and returns its name; raises CommandError
Leaver = Callable[[Plan, str, Sequence[str]], Awaitable[None]]  # has these workers of a role leave; raises CommandError


def by_supervisor(socket: str) -> Starter:
    """Start workers by the `headrace up` of this machine, over its control socket."""

    async def start(plan: Plan, role: str) -> str:
        return await ask_for_worker(socket, model=plan.model, role=role)

    return start


def by_command(command: str) -> Starter:
    """Start workers by an operator's command, which gets the plan as variables and as JSON on its input."""
    name, *arguments = shlex.split(command)

    async def start(plan: Plan, role: str) -> str:
        told = {"model": plan.model, "pool": plan.pool, "desired": plan.desired, "reason": plan.reason}
        variables = {"MODEL": plan.model, "POOL": plan.pool, "ROLE": role, "DESIRED": str(plan.desired.get(role, 0))}
        env = {**os.environ, **{f"HEADRACE_PLAN_{key}": value for key, value in variables.items()}}
        pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        try:
            process = await asyncio.create_subprocess_exec(name, *arguments, env=env, stdin=pipe, stdout=null)
        except OSError as error:
            raise CommandError(f"{name} cannot be run: {error.strerror}") from error
        try:
            async with asyncio.timeout(COMMAND_S):
                await process.communicate(json.dumps(told).encode())
        except TimeoutError:
            process.kill()
            raise CommandError(f"{name} has not ended within {COMMAND_S:g} s") from None
        if process.returncode:
            raise CommandError(f"{name} ended with {process.returncode}")
        return name

    return start


class Actuator:
    """Carries plans out, one action after the other. A failed one is counted, logged, and planned anew at the next tick."""

    def __init__(self, messaging: Messaging, names: Subjects, start: Starter | None, leave: Leaver | None = None) -> None:
        """Without `start` no worker can be started, and plans that want it say so in the log.

        `leave` is for workers that whatever runs them would start again; without it those that leave are told to drain.
        """
        self._nats = messaging
        self._names = names
        self._start = start
        self._leave = leave

    async def carry_out(self, plan: Plan) -> Plan:
        """Do what the plan says and return it with the actions that succeeded, and the numbers that these make."""
        together: dict[str, list[Action]] = {}  # those of a role that drain, as one number says how many remain
        steps: list[list[Action]] = []
        for action in plan.actions:
            if action.kind == "drain" and self._leave is not None:
                together.setdefault(action.role, []).append(action)
            else:
                steps.append([action])
        done: list[Action] = []
        for actions in [*steps, *together.values()]:
            try:
                name = await self._do(plan, actions)
            except (CommandError, JetStreamError) as error:
                for one in actions:
                    ACTIONS.labels(one.kind, "failed").inc()
                    log.warning(
                        "planner.action_failed",
                        pool=plan.pool,
                        kind=one.kind,
                        role=one.role,
                        worker=one.worker,
                        why=type(error).__name__,
                        error=str(error),
                    )
                continue
            for one in actions:
                ACTIONS.labels(one.kind, "done").inc()
                worker, reason = name or one.worker, plan.reason
                log.info("planner.acted", pool=plan.pool, kind=one.kind, role=one.role, worker=worker, reason=reason)
                announce(self._nats, self._names, f"planner {one.kind}", worker=worker, role=one.role, reason=reason)
            done += actions
        desired = dict(plan.supply)
        for one in done:
            desired[one.role] = desired.get(one.role, 0) + (-1 if one.kind == "drain" else 1)
        return replace(plan, actions=tuple(done), desired=desired)

    async def _do(self, plan: Plan, actions: Sequence[Action]) -> str:
        """Do an action, or have all that drain leave together. Returns the name of the worker, or of what starts it."""
        action = actions[0]
        if action.kind == "start":
            if self._start is None:
                raise CommandError("nothing here can start workers: no `headrace up` runs here, and no command is set")
            return await self._start(plan, action.role)
        if action.kind == "drain" and self._leave is not None:
            await self._leave(plan, action.role, [one.worker for one in actions])
            return ""
        member = find_worker(action.worker, await live_workers(self._nats, self._names))
        command: Record = SetRole(role=action.role, grace_s=ROLE_GRACE_S)
        if action.kind != "role":
            command = Wake() if action.kind == "wake" else Drain()
        subject = self._names.operate_worker(member.pool, member.worker)
        try:
            data = await self._nats.request(subject, encode(command), timeout_s=ACCEPTED_S)
        except RequestTimeout:
            if action.kind == "drain":
                raise
            return member.worker  # waking and changing a role take longer: the worker is at it, and its lease says so
        answer = decode(Operated, data) if action.kind == "wake" else decode(Done, data)
        if not answer.ok:
            raise CommandError(f"worker {member.worker} refused: {answer.message}")
        return member.worker
