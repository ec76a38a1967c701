from headrace.broker.codec import pack_u64
from headrace.broker.messages.events import JobEvent
from headrace.router.placement.types import Waiting, WorkerInfo
from headrace.tools.replay_bench.classic import Classic, ClassicWeights
from tests.support.router.replay_stand_ins import PlainView


def classic(workers=2, **weights):
    view = PlainView()
    scheduler = Classic(view, weights=ClassicWeights(**weights), name="me", seed=1)
    for n in range(workers):
        view.add_worker(f"w{n}")
        scheduler.put_worker(WorkerInfo(worker=f"w{n}", slots=64, block_size=512), 0.0)
    return scheduler, view


def request(name, chain, tokens=None):
    return Waiting(id=name, tokens=tokens or 512 * len(chain), chain=chain, block_size=512)


def place(scheduler, one, now_s=0.0):
    assert scheduler.offer(one, now_s) is None
    (placement,) = scheduler.decide(now_s)
    assert scheduler.waiting == 0
    return placement


def event(kind, name, worker, **more):
    return JobEvent(kind, name, 1, worker, **more)


def test_the_cost_is_what_is_to_be_prefilled_and_all_blocks_in_use():
    scheduler, view = classic(3)
    chain = list(range(8))
    # Of 8 blocks 0, 3 and 6 are cached; 2, 0 and 1 others are in use.
    for n, (held, active) in enumerate([((), (90, 91)), (chain[:3], ()), (chain[:6], (90,))]):
        view.held[f"w{n}"] = set(held)
        scheduler.on_event(event("placed", f"x{n}", f"w{n}", blocks=len(active), by="o", hashes=pack_u64(list(active))), 0.0)
    loads = [scheduler._workers[f"w{n}"] for n in range(3)]
    assert [scheduler._cost(request("r", chain), loads[n], (0, 3, 6)[n]) for n in range(3)] == [8 + 10, 5 + 8, 2 + 9]
    assert place(scheduler, request("r", chain)).worker == "w2"


def test_it_goes_where_the_prefix_is():
    scheduler, view = classic()
    view.held["w1"] = {1, 2, 3}
    placement = place(scheduler, request("r", [1, 2, 3, 4]))
    assert (placement.worker, placement.uncached, list(placement.new_blocks)) == ("w1", 512, [4])


def test_blocks_in_use_by_two_requests_count_once():
    scheduler, _ = classic(1)
    place(scheduler, request("a", [1, 2, 3]))
    place(scheduler, request("b", [1, 2, 4]))
    load = scheduler._workers["w0"]
    assert len(load.blocks) == 4
    scheduler.on_event(event("settled", "a", "w0"), 1.0)
    assert set(load.blocks) == {1, 2, 4}


def test_what_another_router_places_counts_and_its_own_echo_does_not():
    scheduler, view = classic()
    place(scheduler, request("a", [1, 2]))
    loads = [load.prefill_tokens for load in scheduler._workers.values()]
    scheduler.on_event(event("placed", "a", "w0", uncached=1024, blocks=2, by="me", hashes=pack_u64([1, 2])), 0.0)
    assert [load.prefill_tokens for load in scheduler._workers.values()] == loads
    scheduler.on_event(event("placed", "b", "w0", uncached=512, blocks=5, by="other", hashes=pack_u64([7])), 0.0)
    assert scheduler._workers["w0"].prefill_tokens - loads[0] == 512
    assert scheduler._workers["w0"].others == 4
    assert view.verify("w0", [7]).device == 1
    scheduler.on_event(event("placed", "c", "gone", uncached=512, blocks=5, by="other"), 0.0)  # a worker that nobody has here
    scheduler.on_event(event("settled", "c", "gone"), 0.0)


def test_a_burst_of_siblings_goes_to_one_worker():
    """Blocks that were placed count before any event says so: without that, siblings would be spread."""
    scheduler, _ = classic(4)
    shared = list(range(40))
    first = place(scheduler, request("r0", [*shared, 100]))
    scheduler.on_event(event("prefilled", "r0", first.worker), 0.1)
    second = place(scheduler, request("r1", [*shared, 101]))
    assert (second.worker, second.uncached) == (first.worker, 512)
