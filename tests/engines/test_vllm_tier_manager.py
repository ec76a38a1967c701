"""The tiers behind the host in vLLM's own manager of tiers, without an engine: stored, found again, evicted, damaged."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.workers.engine import EngineConfig
from headrace.workers.vllm.tiers.settings import offload_config, tiers_of

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(200),
    pytest.mark.filterwarnings("default"),  # vLLM and torch warn about themselves
]

BLOCK_BYTES = 8192  # of two tensors
HOST_BLOCKS = 4
SOON_S = 60.0  # the machine may be busy


def model(folder: Path, weights: bytes = b"weights") -> str:
    """A model that is told from others by its weights."""
    folder.mkdir()
    head = json.dumps({"w": {"dtype": "U8", "shape": [len(weights)], "data_offsets": [0, len(weights)]}}).encode()
    (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + weights)
    return str(folder)


class Core:
    """What an engine's core has of the tiers: vLLM's manager, and the worker that copies, over a device of 16 blocks."""

    def __init__(self, folder: Path, model: str, *, disk_blocks: int = 100, engine: str = "") -> None:
        import torch
        from vllm.v1.kv_offload import base, config

        from headrace.workers.vllm.tiers.cpu_spec import CpuTieredSpec

        self.base = base
        args = {
            "kv_host_gib": HOST_BLOCKS * BLOCK_BYTES / (1 << 30),
            "kv_disk_folder": str(folder),
            "kv_disk_gib": disk_blocks * (BLOCK_BYTES + 100) / (1 << 30),
        }
        tiers = tiers_of(args)
        assert tiers is not None
        given = offload_config(EngineConfig(model=model, served_name="m", args=args), tiers, cpu=True)
        self.name = engine or uuid.uuid4().hex
        settings = config.OffloadingConfig(
            groups=(config.OffloadingGroupConfig(tokens_per_block=32, layer_names=("a", "b"), group_id=0),),
            worker_kv_bytes_per_block=BLOCK_BYTES,
            enable_kv_cache_events=True,
            extra_config=given["kv_connector_extra_config"],
            engine_id=self.name,
            model=config.OffloadingModelConfig(name=model, dtype="float32"),
            cache=config.OffloadingCacheConfig(tokens_per_hash=32, blocks_per_chunk=1),
            parallel=config.OffloadingParallelConfig(
                rank=0,
                world_size=1,
                tp_size=1,
                pp_size=1,
                pcp_size=1,
                dcp_size=1,
                data_parallel_index=0,
                data_parallel_size=1,
                data_parallel_rank_local=None,
                is_parallelism_agnostic=True,
            ),
        )
        self.device = [torch.randint(-100, 100, (16, BLOCK_BYTES // 2), dtype=torch.int8) for _ in range(2)]
        caches = base.CanonicalKVCaches(
            tensors=[base.CanonicalKVCacheTensor(rows, BLOCK_BYTES // 2) for rows in self.device], group_data_refs=[[]]
        )
        self.worker = CpuTieredSpec(settings).get_worker(caches)
        self.manager = CpuTieredSpec(settings).get_manager()
        self.events: list[Any] = []
        self.stats: dict[str, Any] = {}
        self._numbers = iter(range(1_000_000))

    def key(self, number: int) -> bytes:
        key: bytes = self.base.make_offload_key(number.to_bytes(32, "big"), 0)
        return key

    def step(self) -> None:
        self.manager.on_schedule_end(self.base.ScheduleEndContext((), ()))
        self.events += self.manager.take_events()
        found = self.manager.get_stats()
        self.stats |= found.reduce() if found is not None else {}

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + SOON_S
        while not condition():
            assert time.monotonic() < deadline
            self.step()
            time.sleep(0.005)

    def request(self) -> Any:
        made = self.base.ReqContext(req_id=f"r{next(self._numbers)}")
        self.manager.on_new_request(made)
        return made

    def compute(self, number: int, row: int) -> None:
        """A request has computed block `number` in this row of the device."""
        request = self.request()
        wanted = self.manager.prepare_store([self.key(number)], request)
        assert wanted.keys_to_store
        blocks = self.base.GPULoadStoreSpec([row], [1], [0])
        assert self.worker.submit_store(next(self._numbers), blocks, wanted.store_spec)
        self.manager.complete_store([self.key(number)], request)
        self.manager.on_request_finished(request)
        self.until(lambda: ("STORAGE", False, number) in self.told())

    def found(self, number: int, row: int) -> str | None:
        """A request asks for a block. Returns the tier that it came from, and it is in this row then; None if it is nowhere."""
        request, result = self.request(), None
        try:
            while True:
                result = self.manager.lookup(self.key(number), request)
                if result in (self.base.LookupResult.HIT, self.base.LookupResult.MISS):
                    break
                self.step()
                time.sleep(0.005)
            if result is self.base.LookupResult.MISS:
                return None
            source = self.manager.get_load_source(self.key(number), request).name
            chunks = self.manager.prepare_load([self.key(number)], request)
            assert self.worker.submit_load(next(self._numbers), chunks, self.base.GPULoadStoreSpec([row], [1], [0]))
            self.manager.complete_load([self.key(number)], request)
            return str(source)
        finally:
            self.manager.on_request_finished(request)

    def told(self) -> set[tuple[str, bool, int]]:
        return {
            (event.medium.value, event.removed, int.from_bytes(key[:-4], "big")) for event in self.events for key in event.keys
        }

    def row(self, number: int) -> list[Any]:
        return [rows[number].clone() for rows in self.device]

    def close(self) -> None:
        self.manager.shutdown()
        self.worker.shutdown()


@pytest.fixture
def core(tmp_path: Path) -> Iterator[Core]:
    made = Core(tmp_path / "kv", model(tmp_path / "m"))
    yield made
    made.close()


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*-0") if path.is_file()]


def same(first: list[Any], second: list[Any]) -> bool:
    import torch

    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_a_block_that_host_and_device_dropped_comes_back_from_disk_as_it_was(core: Core) -> None:
    before = core.row(3)
    core.compute(1, 3)
    assert core.found(1, 5) == "HOST"
    for number in range(2, 2 + HOST_BLOCKS):
        core.compute(number, 0)
    assert ("CPU", True, 1) in core.told()
    assert core.found(1, 7) == "DISK"
    assert same(core.row(7), before)
    assert same(core.row(5), before)


def test_the_next_engine_finds_what_the_last_one_left_and_one_with_other_weights_does_not(tmp_path: Path) -> None:
    weights = model(tmp_path / "m")
    first = Core(tmp_path / "kv", weights)
    before = first.row(2)
    first.compute(1, 2)
    first.close()
    other = Core(tmp_path / "kv", model(tmp_path / "other", b"trained"))
    assert other.found(1, 4) is None
    other.close()
    second = Core(tmp_path / "kv", weights)
    assert second.found(1, 4) == "DISK"
    assert same(second.row(4), before)
    second.close()


def test_a_damaged_block_is_a_miss_is_counted_and_goes(core: Core, tmp_path: Path) -> None:
    core.compute(1, 3)
    core.manager.reset_cache()
    (file,) = files(tmp_path / "kv")
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    assert core.found(1, 7) is None
    core.until(lambda: core.stats.get("vllm:kv_offload_tier_trouble:('disk', 'damaged')") == 1)
    core.until(lambda: not files(tmp_path / "kv"))


def test_blocks_that_make_room_on_disk_are_told_and_those_of_an_earlier_engine_are_not(tmp_path: Path) -> None:
    weights = model(tmp_path / "m")
    first = Core(tmp_path / "kv", weights, disk_blocks=2)
    first.compute(1, 0)
    first.close()
    second = Core(tmp_path / "kv", weights, disk_blocks=2)
    for number in (2, 3, 4):
        second.compute(number, 0)
    second.until(lambda: ("STORAGE", True, 2) in second.told())
    assert ("STORAGE", True, 1) not in second.told()
    assert len(files(tmp_path / "kv")) == 2
    second.close()


def test_the_memory_of_the_host_tier_has_no_name_that_a_killed_engine_would_leave(core: Core) -> None:
    core.compute(1, 3)
    assert [name for name in os.listdir("/dev/shm") if core.name in name] == []  # noqa: S108  # listed, not written to


def test_a_host_tier_without_room_for_a_block_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.engines.test_vllm_tier_manager.HOST_BLOCKS", 0.5)
    with pytest.raises(ValueError, match="kv_host_gib is too small for a single block of 8192 bytes"):
        Core(tmp_path / "kv", model(tmp_path / "m"))
