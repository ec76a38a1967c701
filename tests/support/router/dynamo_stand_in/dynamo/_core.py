"""A stand-in for Dynamo's binding: the cost function of its selection core, over cache events that are read late."""

import os

import msgspec
import zmq


def compute_block_hash_for_seq(tokens, size):
    """Return a hash of each block of tokens."""
    return [hash(tuple(tokens[at : at + size])) % (1 << 64) for at in range(0, len(tokens), size)]


class SelectionService:
    """Selects the first worker of lowest cost. Events are read when overlaps are asked for, and applied at the next time."""

    def __init__(self):
        self._context = zmq.Context.instance()
        self._sockets, self._numbers = {}, {}
        self._held = {}  # worker → name of a block in events → hash of its tokens
        self._size = 0
        self._scale = float(os.environ["DYN_ROUTER_PREFILL_LOAD_SCALE"])
        self._credit = float(os.environ["DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT"])
        self._read = []
        self._active = {}  # reservation → (worker, uncached, blocks)

    def shutdown(self):
        for socket in self._sockets.values():
            socket.close(linger=0)

    async def upsert_worker(self, worker):
        number = worker["worker_id"]
        socket = self._context.socket(zmq.SUB)
        socket.subscribe(b"")
        socket.connect(worker["kv_events_endpoints"][0])
        self._sockets[number], self._numbers[number], self._held[number] = socket, 0, {}
        self._size = worker["block_size"]

    async def overlap_scores(self, prompt):
        for batch in self._read:
            self._apply(*batch)
        self._read = [(worker, *socket.recv_multipart()) for worker, socket in self._sockets.items() if socket.poll(0)]
        (block,) = prompt["block_hashes"]
        return {
            "workers": [
                {"worker_id": worker, "device_blocks": int(block % (1 << 64) in held.values())}
                for worker, held in self._held.items()
            ]
        }

    def _apply(self, worker, _topic, number, batch):
        assert int.from_bytes(number, "big") == self._numbers[worker]
        self._numbers[worker] += 1
        held = self._held[worker]
        for kind, blocks, *more in msgspec.msgpack.decode(batch)[1]:
            if kind == "BlockRemoved":
                for block in blocks:
                    del held[block]
                continue
            parent, tokens, size = more[:3]
            assert parent is None or parent in held
            held.update(zip(blocks, compute_block_hash_for_seq(tokens, size), strict=True))

    async def select_and_reserve(self, request):
        hashes = [block % (1 << 64) for block in request["block_hashes"]]
        best = None
        for worker, held in self._held.items():
            names, cached = set(held.values()), 0
            while cached < len(hashes) and hashes[cached] in names:
                cached += 1
            mine = [active for active in self._active.values() if active[0] == worker]
            blocks = len({block for active in mine for block in active[2]} | set(request["sequence_hashes"]))
            prefill = (sum(active[1] for active in mine) + request["isl_tokens"]) / self._size
            cost = self._scale * max(prefill - self._credit * cached, 0) + blocks
            if best is None or cost < best[0]:
                best = cost, worker, cached, blocks
        _, worker, cached, blocks = best
        uncached = max(request["isl_tokens"] - cached * self._size, 0)
        self._active[request["selection_id"]] = worker, uncached, request["sequence_hashes"]
        return {
            "worker_id": worker,
            "overlap": {"gpu": cached * self._size},
            "effective_prefill_tokens": uncached,
            "potential_decode_blocks": blocks,
        }

    async def prefill_complete(self, name):
        worker, _, blocks = self._active[name]
        self._active[name] = worker, 0, blocks

    async def free_reservation(self, name):
        del self._active[name]
