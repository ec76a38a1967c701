"""A plain cache view and plain schedulers, with the interfaces of the real ones."""

import random

from headrace.router.index.types import NO_OVERLAP, Overlap
from headrace.router.placement.types import Placement


class PlainView:
    """A set of blocks for every worker; what was predicted counts until it expires."""

    def __init__(self, ttl_s=5.0):
        self.held = {}
        self.predicted = {}
        self.chains = {}
        self.ttl_s = ttl_s

    def add_worker(self, worker, *, approximate=False, capacity_blocks=0):
        self.held.setdefault(worker, set())
        self.predicted.setdefault(worker, {})

    def drop_worker(self, worker):
        self.held.pop(worker, None)
        self.predicted.pop(worker, None)

    def apply(self, worker, *, cleared=False, removed, stored, now_s):
        held, predicted = self.held[worker], self.predicted[worker]
        if cleared:
            held.clear()
        held.difference_update(removed.get("device", ()))
        for block in stored.get("device", ()):
            held.add(block)
            predicted.pop(block, None)

    def replace(self, worker, blocks, *, now_s):
        self.held[worker] = set(blocks.get("device", ()))

    def predict(self, worker, blocks, *, now_s):
        held, predicted = self.held[worker], self.predicted[worker]
        for block in blocks:
            if block not in held:
                predicted[block] = now_s + self.ttl_s

    def expire(self, now_s):
        for worker, predicted in self.predicted.items():
            self.predicted[worker] = {block: until for block, until in predicted.items() if until > now_s}

    def track(self, request_id, chain):
        self.chains[request_id] = chain

    def untrack(self, request_id):
        self.chains.pop(request_id, None)

    def overlaps(self, request_id):
        chain = self.chains[request_id]
        return {worker: found for worker in self.held if (found := self.verify(worker, chain)) != NO_OVERLAP}

    def verify(self, worker, chain):
        held, predicted = self.held[worker], self.predicted[worker]
        for count, block in enumerate(chain):
            if block not in held and block not in predicted:
                return Overlap(count) if count else NO_OVERLAP
        return Overlap(len(chain))


class RoundRobin:
    """Binds early, one worker after the other."""

    def __init__(self, view, name, seed):
        self.view, self.name = view, name
        self.rng = random.Random(seed)
        self.workers = []
        self.new = []
        self.next = 0

    @property
    def waiting(self):
        return len(self.new)

    def set_routers(self, names):
        self.routers = list(names)

    def put_worker(self, info, now_s):
        self.workers.append(info.worker)

    def on_report(self, report, now_s):
        pass

    def on_event(self, event, now_s):
        pass

    def offer(self, request, now_s):
        self.new.append(request)

    def decide(self, now_s):
        new, self.new = self.new, []
        return [self.place(request, now_s) for request in new]

    def next_wake_s(self, now_s):
        return None

    def place(self, request, now_s):
        self.next += 1
        return self.placement(request, self.workers[self.next % len(self.workers)], now_s)

    def placement(self, request, worker, now_s):
        return Placement(
            request=request,
            worker=worker,
            uncached=request.tokens,
            new_blocks=request.chain,
            predicted_ttft_s=0.0,
            waited_s=now_s - request.arrived_s,
            reason="policy",
        )


class Late(RoundRobin):
    """The sketch of design §10, shortened: dispatch only to workers with less than a step to prefill, the least uncached
    work less ageing first, and wait for the holder of the prefix where it is sooner."""

    age = 0.5

    def __init__(self, view, name, seed):
        super().__init__(view, name, seed)
        self.pending = {}  # worker → tokens
        self.decoding = {}
        self.own = {}

    def put_worker(self, info, now_s):
        super().put_worker(info, now_s)
        self.pending[info.worker] = 0
        self.decoding[info.worker] = 0

    def on_event(self, event, now_s):
        worker, uncached = self.own.get(event.id, (event.worker, 0))
        if event.kind == "placed":
            self.own[event.id] = (event.worker, event.uncached)
            self.pending[event.worker] += event.uncached
            self.view.predict(event.worker, [], now_s=now_s)
        elif event.kind == "prefilled":
            self.pending[worker] -= uncached
            self.decoding[worker] += 1
        elif event.kind == "settled":
            self.decoding[worker] -= 1
            self.own.pop(event.id, None)

    def decide(self, now_s):
        made = []
        while self.new:
            free = [w for w in self.workers if self.pending[w] < 8192 and self.decoding[w] < 64]
            if not free:
                break
            best = None
            for request in self.new[:64]:
                costs = []
                for worker in self.workers:
                    cached = self.view.verify(worker, request.chain).device * 512
                    uncached = max(request.tokens - cached, 1)
                    load = 0.000_08 * self.decoding[worker] * (uncached / 8192 + 1)
                    costs.append(((self.pending[worker] + uncached) / 24000 + load, worker, uncached))
                sooner, there = min(costs), min(c for c in costs if c[1] in free)
                if sooner[0] < there[0] - 1e-9:
                    continue
                rank = there[2] / 24000 - (now_s - request.arrived_s) * self.age
                if best is None or rank < best[0]:
                    best = (rank, request, there[1], there[2])
            if best is None:
                break
            _, request, worker, uncached = best
            self.new.remove(request)
            self.own[request.id] = (worker, uncached)
            self.pending[worker] += uncached
            self.view.predict(worker, request.chain, now_s=now_s)
            made.append(self.placement(request, worker, now_s))
        return made
