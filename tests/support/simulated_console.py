"""The console over a simulated deployment of any size, as a server on a port of its own."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.broker.keys import KeyRecord
from headrace.broker.messages.control import Routed
from headrace.broker.messages.events import LoadReport
from headrace.broker.messages.members import RouterMember, WorkerMember
from headrace.console.app import ConsoleOptions, build_app
from headrace.console.guard import ConsoleGuard
from headrace.console.readers import StartingWorker, deployment_tables, prefix_map
from headrace.console.tables import PAGE, Sections, Shared, Source, placement_row

KEY = "the-admin-key-of-a-test"


class SimulatedDeployment:
    """So many workers, whose loads change at each look, and so many placements on record."""

    def __init__(self, *, workers: int, requests: int) -> None:
        self._dice = random.Random(1)
        self.requests = requests
        self.looks = 0
        self._members = [
            WorkerMember(
                worker=f"worker-{n:04}",
                pool=f"pool-{n % 4}",
                model=f"model-{n % 4}",
                slots=64,
                blocks=4096,
                engine="sim",
                engine_version="1",
                host=f"host-{n % 50}",
                pid=1000 + n,
                started=time.time() - n,
                fleet=("cheap", "dear")[n % 3 == 0] if n % 4 == 1 else "",
                price=(1.0, 4.0)[n % 3 == 0] if n % 4 == 1 else 0.0,
            )
            for n in range(workers)
        ]

    async def deployment(self) -> Any:
        self.looks += 1
        now = time.time()
        roll = self._dice.randint
        reports = {
            member.worker: LoadReport(
                worker=member.worker, epoch=1, n=self.looks, at=now, slots=64, running=roll(0, 64), waiting=roll(0, 9),
                blocks_total=4096, blocks_used=roll(0, 4096), step_s=0.02, step_decodes=roll(0, 64),
                tiers=[roll(0, 4096), roll(0, 90_000), 0],
            )
            for member in self._members
        }  # fmt: skip
        tables = deployment_tables(
            workers=self._members,
            reports=reports,
            routers=[RouterMember(router="router-1", pool=f"pool-{n}") for n in range(4)],
            frontends=2,
            stored={"pool-0": {"std": self.requests, "hi": 3}, "pool-cold": {"std": 2}},
            now=now,
            starting=[StartingWorker("worker-cold", 7, round(now - 40), doing="engine 'sim' is starting")],
        )
        tables["pools"]["pool-cold"]["since"] = round(now - 41)
        return tables

    def placement(self, number: int) -> Routed:
        worker = self._members[number % len(self._members)].worker
        hashes = (number % 60).to_bytes(8, "big") * 4
        fleet, reason, target_s = ("", "", None) if number % 4 != 1 else ("cheap", "cheapest", 0.3)
        return Routed(
            at=time.time(), id=f"{number:026x}", worker=worker, tokens=500, uncached=number % 500, hashes=hashes,
            fleet=fleet, fleet_reason=reason, ttft_target_s=target_s,
        )  # fmt: skip

    async def listing(self, request: Request) -> Response:
        before = int(request.query_params.get("before", self.requests + 1))
        numbers = range(before - 1, max(0, before - 1 - PAGE), -1)
        rows = [{"number": n, **placement_row(self.placement(n))} for n in numbers]
        told = {"placements": rows, "before": rows[-1]["number"] if len(rows) == PAGE else None}
        return Response(msgspec.json.encode(told), media_type="application/json")

    async def story(self, request: Request) -> Response:
        story = {
            "id": request.path_params["id"], "ingress": "i-1", "pool": "pool-0", "model": "model-0", "tenant": "_",
            "request_class": "std", "submitted": time.time() - 9, "prompt_tokens": 40, "answer_tokens": 400,
            "ended_s": 8.0, "finish": ["length"],
            "events": [
                {"after_s": 0.1, "kind": "started", "attempt": 1, "worker": "worker-0001", "tokens": 0, "uncached": 0},
                {"after_s": 3.0, "kind": "moved", "attempt": 1, "worker": "worker-0001", "tokens": 0, "uncached": 0},
            ],
            "stages": [
                {"name": "queue", "begin_s": 0, "end_s": 0.1, "worker": ""},
                {"name": "decode", "begin_s": 0.1, "end_s": 3.0, "worker": "worker-0001"},
                {"name": "move", "begin_s": 3.0, "end_s": 3.2, "worker": ""},
                {"name": "decode", "begin_s": 3.2, "end_s": 8.0, "worker": "worker-0002"},
            ],
        }  # fmt: skip
        candidates = [{"worker": "worker-0001", "cost_s": 0.1, "uncached": 3}, {"worker": "worker-0002", "why_not": "no room"}]
        decided = {"id": story["id"], "router": "router-1", "policy": "kv", "state": "placed", "worker": "worker-0001"}
        decided["fleet"] = {
            "fleet": "cheap", "reason": "cheapest", "ttft_target_s": 0.3, "itl_target_s": 0.04,
            "options": [
                {"fleet": "cheap", "state": "meets", "ttft_s": 0.12, "itl_s": 0.02, "price": 1},
                {"fleet": "dear", "state": "meets", "rank": 1, "ttft_s": 0.05, "itl_s": 0.01, "price": 4},
                {"fleet": "slow", "state": "late", "rank": 2, "ttft_s": 0.9, "itl_s": 0.02, "late_s": 0.6},
            ],
        }  # fmt: skip
        told = {"stories": [story], "recorded": [], "silent": 0, "decided": [{**decided, "candidates": candidates}]}
        return Response(msgspec.json.encode(told), media_type="application/json")

    def sections(self) -> Sections:
        shared = Shared(self.deployment)
        return Sections(
            {
                **{name: shared.source(name) for name in ("summary", "pools", "workers")},
                "prefixes": Source(self._prefixes),
                **{name: Source(_fixed(rows)) for name, rows in FIXED.items()},
            }
        )

    async def _prefixes(self) -> Any:
        return prefix_map((n, self.placement(n)) for n in range(1, 300))


def _fixed(rows: dict[str, dict[str, Any]]) -> Any:
    async def read() -> dict[str, dict[str, Any]]:
        return rows

    return read


FIXED: dict[str, dict[str, dict[str, Any]]] = {
    "queues": {
        f"hr.req.pool-0.std.tenant-{n}": {
            "pool": "pool-0", "class": "std", "tenant": f"tenant-{n}", "worker": "", "stream": "REQ", "waiting": n,
            "oldest": 1.0e9,
        }
        for n in range(1, 60)
    },
    "streams": {
        "HR_REQ": {
            "exists": True, "about": "requests", "messages": 100_000, "bytes": 10**8, "subjects": 9, "last_seq": 1,
            "oldest_s": 3, "consumers": 1, "lag": 5, "in_hand": 6, "redelivered": 0,
            "readers": [["REQ_pool-0_std", 5, 6, 0, 1]],
        },
    },
    "routers": {
        "router-1 pool-0": {
            "router": "router-1", "pool": "pool-0", "host": "h", "pid": 1, "started": 1, "state": "serving", "waiting": 3,
            "placing": 1, "refusing": 0,
        },
    },
    "letters": {
        "7": {
            "number": 7, "at": 1.0e9, "reason": "poison", "subject": "hr.dlq.x", "request": "a" * 26, "model": "model-0",
            "tenant": "_", "attempt": 3, "history": [{"attempt": 1, "worker": "worker-0001", "group": ""}],
        },
    },
    "batches": {
        "batch_1": {
            "tenant": "_", "endpoint": "/v1/chat/completions", "model": "model-0", "status": "in_progress", "created": 1,
            "expires": 2, "total": 100, "completed": 40, "failed": 1, "error": "",
        },
    },
    "models": {
        "pool-0": {
            "model": "model-0", "namespace": "default", "kinds": ["chat"], "context": 4096, "block": 16, "tools": "",
            "reasoning": "", "media": [], "aliases": ["m"], "adapters": ["a"],
        },
    },
}  # fmt: skip


@contextmanager
def served(deployment: SimulatedDeployment, *, private: bool = False) -> Iterator[str]:
    """Serve the console of a simulated deployment, and yield its address."""

    async def no_keys() -> list[KeyRecord]:
        return []

    async def chat_models(request: Request) -> Response:
        return Response(b'{"data": [{"id": "model-0"}]}', media_type="application/json")

    guard = ConsoleGuard(host="127.0.0.1", key=KEY, private=private, stored=no_keys)
    console = build_app(
        sections=deployment.sections(),
        guard=guard,
        routes=[
            Route("/console/api/requests", deployment.listing),
            Route("/console/api/requests/{id}", deployment.story),
            Route("/console/api/chat/models", chat_models),
        ],
        options=ConsoleOptions(frontend="http://127.0.0.1:1", key=KEY, may_kill=True),
    )
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(console.app, ws="none", lifespan="off", log_config=None, timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        console.live.close()
        server.should_exit = True
        thread.join(20)
        listener.close()
