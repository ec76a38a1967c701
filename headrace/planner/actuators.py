"""Does what a plan says: roles, waking and draining by commands to workers, starts by a supervisor, a command or Kubernetes."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
from collections.abc import Sequence
from typing import Protocol

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


def declare(pool: str) -> None:
    """Have every reason as a series from the beginning, so that a rate of it can be asked for."""
    for reason in REASONS:
        TICKS.labels(pool, reason)


log = structlog.get_logger()

ACCEPTED_S = 3.0  # for a worker to accept a command
ROLE_GRACE_S = 30.0  # for its requests before a worker changes its role
COMMAND_S = 15.0


class Starter(Protocol):
    async def start(self, plan: Plan, role: str) -> str:
        """Start one and return how it is called. Raises CommandError."""


class Leaver(Protocol):
    """Has workers leave where a command to them is not enough, because what runs them would start them again."""

    async def leave(self, plan: Plan, role: str, workers: Sequence[str]) -> list[str]:
        """Have these workers of a role leave and return those that do. Raises CommandError."""


class SupervisorStarter:
    """Starts workers by the `headrace up` of this machine."""

    def __init__(self, socket: str) -> None:
        """`socket`: the path of its control socket."""
        self._socket = socket

    async def start(self, plan: Plan, role: str) -> str:
        return await ask_for_worker(self._socket, model=plan.model, role=role)


class CommandStarter:
    """Starts workers by an operator's command, which gets what is wanted as variables and the plan as JSON on its input."""

    def __init__(self, command: str) -> None:
        self._words = shlex.split(command)

    async def start(self, plan: Plan, role: str) -> str:
        env = {
            **os.environ,
            "HEADRACE_PLAN_MODEL": plan.model,
            "HEADRACE_PLAN_POOL": plan.pool,
            "HEADRACE_PLAN_ROLE": role,
            "HEADRACE_PLAN_DESIRED": str(plan.desired.get(role, 0)),
        }
        told = json.dumps({"model": plan.model, "pool": plan.pool, "desired": plan.desired, "reason": plan.reason}).encode()
        try:
            process = await asyncio.create_subprocess_exec(
                *self._words, env=env, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
            )
        except OSError as error:
            raise CommandError(f"{self._words[0]} cannot be run: {error.strerror}") from error
        try:
            async with asyncio.timeout(COMMAND_S):
                await process.communicate(told)
        except TimeoutError:
            process.kill()
            raise CommandError(f"{self._words[0]} has not ended within {COMMAND_S:g} s") from None
        if process.returncode:
            raise CommandError(f"{self._words[0]} ended with {process.returncode}")
        return self._words[0]


class Actuator:
    """Carries plans out, one action after the other. A failed one is counted, logged, and planned anew at the next tick."""

    def __init__(self, messaging: Messaging, names: Subjects, starter: Starter | None, leaver: Leaver | None = None) -> None:
        """Without a `starter` no worker can be started, and plans that want it say so in the log.

        Without a `leaver` those that leave are told to drain.
        """
        self._nats = messaging
        self._names = names
        self._starter = starter
        self._leaver = leaver

    async def carry_out(self, plan: Plan) -> Plan:
        """Do what the plan says and return it with the actions that succeeded, and the numbers that these make."""
        done: list[Action] = []
        for action in plan.actions:
            if action.kind == "drain" and self._leaver is not None:
                continue
            try:
                what = await self._do(plan, action)
            except (CommandError, JetStreamError) as error:
                self._failed(plan, action, error)
                continue
            self._done(plan, action, what)
            done.append(action)
        if self._leaver is not None:
            done += await self._leave(plan, self._leaver)
        return carried_out(plan, done)

    async def _leave(self, plan: Plan, leaver: Leaver) -> list[Action]:
        """Have all that drain leave, those of a role together, as one number says how many remain."""
        done: list[Action] = []
        for role in dict.fromkeys(one.role for one in plan.actions if one.kind == "drain"):
            leaving = [one for one in plan.actions if one.kind == "drain" and one.role == role]
            try:
                gone = await leaver.leave(plan, role, [one.worker for one in leaving])
            except (CommandError, JetStreamError) as error:
                for action in leaving:
                    self._failed(plan, action, error)
                continue
            for action in leaving:
                if action.worker in gone:
                    self._done(plan, action, action.worker)
                    done.append(action)
        return done

    def _failed(self, plan: Plan, action: Action, error: Exception) -> None:
        ACTIONS.labels(action.kind, "failed").inc()
        log.warning(
            "planner.action_failed",
            pool=plan.pool,
            kind=action.kind,
            role=action.role,
            worker=action.worker,
            why=type(error).__name__,
            error=str(error),
        )

    def _done(self, plan: Plan, action: Action, what: str) -> None:
        ACTIONS.labels(action.kind, "done").inc()
        log.info("planner.acted", pool=plan.pool, kind=action.kind, role=action.role, worker=what, reason=plan.reason)
        announce(self._nats, self._names, f"planner {action.kind}", worker=what, role=action.role, reason=plan.reason)

    async def _do(self, plan: Plan, action: Action) -> str:
        if action.kind == "start":
            if self._starter is None:
                raise CommandError("nothing here can start workers: no `headrace up` runs here, and no command is set")
            return await self._starter.start(plan, action.role)
        if action.kind == "drain":
            return await self._tell(action.worker, Drain(), Done)
        if action.kind == "wake":
            return await self._tell(action.worker, Wake(), Operated)
        return await self._tell(action.worker, SetRole(role=action.role, grace_s=ROLE_GRACE_S), Done)

    async def _tell(self, worker: str, command: Record, kind: type[Done] | type[Operated]) -> str:
        """Tell a worker. One that does not answer at once is at it: waking and changing a role take longer, its lease tells."""
        member = find_worker(worker, await live_workers(self._nats, self._names))
        subject = self._names.operate_worker(member.pool, member.worker)
        try:
            answer = decode(kind, await self._nats.request(subject, encode(command), timeout_s=ACCEPTED_S))
        except RequestTimeout:
            if kind is Done and isinstance(command, Drain):
                raise
            return member.worker
        if not answer.ok:
            raise CommandError(f"worker {member.worker} refused: {answer.message}")
        return member.worker


def carried_out(plan: Plan, done: Sequence[Action]) -> Plan:
    desired = dict(plan.supply)
    for action in done:
        if action.kind == "drain":
            desired[action.role] = desired.get(action.role, 0) - 1
        else:
            desired[action.role] = desired.get(action.role, 0) + 1
    return replace(plan, actions=tuple(done), desired=desired)
