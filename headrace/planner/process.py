"""The planner's process: leads or follows, plans at each tick, and serves the result to autoscalers.

`/desired`: all pools and roles. `/desired/<pool>/<role>`: one number, as KEDA's `metrics-api` reads it (`valueLocation`:
`desired`). A plan that is too old is an error and no number: a scaler then keeps what there is.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from threading import Thread
from typing import Any, ParamSpec, TypeVar
from wsgiref.simple_server import make_server

import msgspec
import structlog

from headrace.broker.part_state import PartState, Standing
from headrace.commands.run import ProbeHandler, ProbeServer, probe_app
from headrace.config.options import PlannerSettings, for_fleet
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.lease import LeaseKeeper
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects, slug
from headrace.planner import actuators
from headrace.planner.actuators import Actuator
from headrace.planner.capacity import Speed
from headrace.planner.observe import DeploymentWatch, Observation, PoolKey
from headrace.planner.plan import Plan, within_budget
from headrace.planner.pool_planner import PoolPlanner, dump, load


class DesiredPage:
    """The last plan of each pool, readable from any thread."""

    def __init__(self, *, fresh_s: float, wall: Callable[[], float] = time.time) -> None:
        """`fresh_s`: a plan is served for so long."""
        self._fresh_s = fresh_s
        self._wall = wall
        self._plans: dict[str, Plan] = {}

    def put(self, plans: Iterable[Plan]) -> None:
        self._plans = {**self._plans, **{plan.pool: plan for plan in plans}}

    def answer(self, path: str) -> tuple[int, Any]:
        """Return HTTP status and body of a path below `/desired`."""
        plans = {pool: plan for pool, plan in self._plans.items() if self._wall() - plan.at <= self._fresh_s}
        parts = [part for part in path.split("/") if part][1:]
        if not parts:
            return (200, {"pools": [_row(plan) for plan in plans.values()]}) if plans else (503, {"error": "no fresh plan"})
        plan = plans.get(parts[0])
        if plan is None:
            old = parts[0] in self._plans
            return (503, {"error": "the plan is old"}) if old else (404, {"error": f"no pool {parts[0][:80]!r}"})
        if len(parts) == 1:
            return 200, _row(plan)
        if len(parts) > 2 or parts[1] not in plan.desired:
            return 404, {"error": f"pool {plan.pool} has the roles {', '.join(plan.desired) or 'of no worker'}"}
        return 200, {"desired": plan.desired[parts[1]], "supply": plan.supply.get(parts[1], 0), "reason": plan.reason}


def _row(plan: Plan) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in ("pool", "model", "at", "reason", "desired", "supply")}


def page_app(page: DesiredPage, state: PartState) -> Callable[..., Iterable[bytes]]:
    probes = probe_app(state)

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path != "/desired" and not path.startswith("/desired/"):
            return probes(environ, start_response)
        status, body = page.answer(path)
        headers = [("content-type", "application/json"), ("cache-control", "no-store")]
        start_response(f"{status} {HTTPStatus(status).phrase}", headers)
        return [msgspec.json.encode(body)]

    return app


def serve_page(host: str, port: int, page: DesiredPage, state: PartState) -> int:
    """Serve in a thread that ends with the process. Returns the port. Raises OSError when the address cannot be used."""
    server = make_server(host, port, page_app(page, state), ProbeServer, ProbeHandler)
    Thread(target=server.serve_forever, name="planner-page", daemon=True).start()
    return int(server.server_port)


log = structlog.get_logger()

LEASE_KEY = "planner_leader"
LEASE_TTL_S = 6.0
LOOK_S = 20.0  # that one look may take
P = ParamSpec("P")
T = TypeVar("T")


class PlannerProcess:
    """The planner of a deployment, over one connection. Several may run: the one that holds the lease decides."""

    def __init__(
        self,
        messaging: Messaging,
        names: Subjects,
        settings: PlannerSettings,
        page: DesiredPage,
        actuator: Actuator | None,
        profile: dict[str, Speed] | None = None,
    ) -> None:
        """Without an `actuator` plans are told and not carried out. `profile`: measured speeds by role."""
        self._nats = messaging
        self._settings = settings
        self._page = page
        self._actuator = actuator
        self._profile = profile
        self._watch = DeploymentWatch(messaging, names)
        self._planners: dict[PoolKey, PoolPlanner] = {}
        self._priority = [name.strip() for name in settings.priority.split(",") if name.strip()]
        self._told: dict[PoolKey, tuple[str, dict[str, int]]] = {}
        self._bucket, token = names.bucket("state"), secrets.token_bytes(8)
        self._lease = LeaseKeeper(
            messaging, self._bucket, LEASE_KEY, token, ttl_s=LEASE_TTL_S, on_change=self._on_lease, contested=True
        )

    @property
    def leading(self) -> bool:
        """True while this process decides."""
        return self._lease.held

    async def run(self, state: PartState) -> None:
        """Plan until cancelled."""
        await self._watch.start()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._lease.run(), name="planner lease")
                group.create_task(state.keep(self._describe), name="planner state")
                await self._work()
        finally:
            await self._watch.stop()
            await self._lease.release()

    async def _work(self) -> None:
        while True:
            try:
                async with asyncio.timeout(LOOK_S):
                    seen = await self._watch.observe()
                if self.leading:
                    await self._lead(seen)
                else:
                    await self._follow()
            except TimeoutError:
                log.warning("planner.look_late", limit_s=LOOK_S)
            except JetStreamError as error:
                log.warning("planner.tick_failed", error=str(error))
            await asyncio.sleep(self._settings.tick_s)

    async def _lead(self, seen: Mapping[PoolKey, Observation]) -> None:
        await self._remember_pools()
        planners = {key: self._planners.get(key) or await self._recall(key) for key in seen}
        wanted = {key: await self._computed(planners[key].tick, observation) for key, observation in seen.items()}
        held = {plan.pool: len(seen[key].workers or ()) + sum(plan.starting.values()) for key, plan in wanted.items()}
        plans = within_budget(list(wanted.values()), held, self._settings.budget, self._priority)
        for key, plan in zip(wanted, plans, strict=True):
            planner = planners[key]
            self._tell(key, plan)
            if self._actuator is not None and plan.actions and self.leading:
                done = await self._actuator.carry_out(plan)
                planner.acted(done)
            for name, count in planner.book.failed.items():
                actuators.FAILED_FORECASTS.labels(plan.pool, name).set(count)
            for name, loss in planner.book.scores().items():
                actuators.FORECAST_LOSS.labels(plan.pool, name).set(loss)
            actuators.LOST_STARTS.labels(plan.pool).set(planner.starts.lost)
            await self._store(key, planner, plan)
        self._page.put(plans)

    async def _computed(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do what may take long beside the event loop: fitting forecasters of others would hold up the lease."""
        if self._settings.forecasters:
            return await asyncio.to_thread(work, *args, **kwargs)
        return work(*args, **kwargs)

    def _tell(self, key: PoolKey, plan: Plan) -> None:
        actuators.show(plan)
        told = (plan.reason, plan.desired)
        if self._told.get(key) == told:
            return
        self._told[key] = told
        log.info(
            "planner.decided",
            pool=plan.pool,
            reason=plan.reason,
            mode=self._settings.mode,
            desired=plan.desired,
            supply=plan.supply,
            needed=plan.needed,
            rate=plan.rate,
            forecast=plan.forecast_high,
            forecaster=plan.forecaster,
            waiting=plan.waiting,
        )

    # -- memory -----------------------------------------------------------------------------------------------------------

    def _bucket_key(self, kind: str, key: PoolKey) -> str:
        return f"{kind}.{key.model}.{slug(key.fleet) if key.fleet else '_'}"

    async def _recall(self, key: PoolKey) -> PoolPlanner:
        planner = PoolPlanner(for_fleet(self._settings, key.fleet), profile=self._profile)
        entry = await self._nats.bucket(self._bucket).get(self._bucket_key("planner", key))
        known = self._watch.known[key]
        if entry is not None and await self._computed(load, planner, entry.value, model=known, pool=str(key)):
            log.info("planner.recalled", pool=str(key), steps=len(planner.series.values))
        self._planners[key] = planner
        return planner

    async def _store(self, key: PoolKey, planner: PoolPlanner, plan: Plan) -> None:
        if not self.leading:
            return
        bucket = self._nats.bucket(self._bucket)
        await bucket.put(self._bucket_key("planner", key), dump(planner, model=plan.model, pool=plan.pool))
        await bucket.put(self._bucket_key("plan", key), msgspec.msgpack.encode(plan))

    async def _remember_pools(self) -> None:
        """Learn which pools there were before, once: those that have no worker now must not be forgotten."""
        if self._planners:
            return
        for plan in await self._stored_plans():
            model, _, fleet = plan.pool.partition(".")
            self._watch.known.setdefault(PoolKey(model, fleet), plan.model)
            self._watch.prices.setdefault(PoolKey(model, fleet), plan.price)

    async def _stored_plans(self) -> list[Plan]:
        plans: list[Plan] = []
        for entry in await self._nats.bucket(self._bucket).entries("plan.>"):
            try:
                plans.append(msgspec.msgpack.decode(entry.value, type=Plan))
            except msgspec.MsgspecError as error:
                log.warning("planner.plan_unreadable", key=entry.key, error=str(error))
        return plans

    async def _follow(self) -> None:
        """Serve what the leader has planned, and know nothing that could be old when this process leads."""
        self._planners.clear()
        self._page.put(await self._stored_plans())

    # -- standing ---------------------------------------------------------------------------------------------------------

    def _on_lease(self, held: bool) -> None:
        actuators.LEADING.set(held)
        log.info("planner.leads" if held else "planner.follows")
        self._planners.clear()  # another one may have led meanwhile: its memory is read again

    def _describe(self) -> Standing:
        why = "" if self._nats.connected else "no connection to the NATS server"
        return Standing(ready=not why, healthy=not why, why=why, facts={"leading": self.leading, "mode": self._settings.mode})
