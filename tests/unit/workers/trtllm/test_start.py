"""Engines of several GPUs and nodes: which process is the worker, and how it is started."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace.workers.errors import EngineStartFailed
from headrace.workers.trtllm.start import (
    LoadMeter,
    attention_ranks,
    check_launch,
    keep_polling,
    launch_command,
    poll_once,
    shared_by,
    world_size,
)

LEADER = {"TLLM_SPAWN_PROXY_PROCESS": "1", "TLLM_SPAWN_PROXY_PROCESS_IPC_ADDR": "tcp://127.0.0.1:10012", "tllm_mpi_size": "8"}
EIGHT = {"tensor_parallel_size": 4, "pipeline_parallel_size": 2}

# Its shape is that of the package's own script: rank 0 runs the command in an environment without MPI's variables, and all
# other ranks run the package's worker processes instead.
LAUNCHER = """#!/bin/sh
rank=${SLURM_PROCID:-${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}}}
export TLLM_SPAWN_PROXY_PROCESS=1 TLLM_SPAWN_PROXY_PROCESS_IPC_ADDR=tcp://127.0.0.1:10012
export tllm_mpi_size=${SLURM_NTASKS:-${OMPI_COMM_WORLD_SIZE:-1}}
[ "$rank" = 0 ] || { echo "rank $rank: a worker process of the package"; exit 0; }
unset SLURM_PROCID SLURM_NTASKS OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE PMI_RANK
exec "$@"
"""


def test_sizes_follow_from_the_settings() -> None:
    assert (world_size({}), world_size(EIGHT), world_size({"context_parallel_size": 3})) == (1, 8, 3)
    assert attention_ranks(EIGHT) == 1
    assert attention_ranks(EIGHT | {"enable_attention_dp": True}) == 4
    assert shared_by({"tensor_parallel_size": 1, "moe_expert_parallel_size": None}) == {}
    assert shared_by(EIGHT | {"moe_expert_parallel_size": 4}) == {"tensor": 4, "pipeline": 2, "expert": 4}


@pytest.mark.parametrize(
    ("args", "environ", "gpus"),
    [({}, {"SLURM_PROCID": "3"}, 1), (EIGHT, LEADER, 4), (EIGHT, {}, 8), (EIGHT, {}, None), (EIGHT, {"PMI_RANK": "0"}, 8)],
)
def test_a_worker_that_can_start_its_ranks_is_let_start(
    args: dict[str, int], environ: dict[str, str], gpus: int | None
) -> None:
    check_launch(args, environ, gpus=gpus)


@pytest.mark.parametrize(
    ("environ", "gpus", "told"),
    [
        ({}, 4, "ask for 8 GPUs and this machine has 4"),
        ({"SLURM_PROCID": "3"}, 8, "this is task 3 of an MPI job"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, 8, "this is task 1 of an MPI job"),
        (LEADER | {"tllm_mpi_size": "4"}, 4, "trtllm-llmapi-launch runs 4 tasks, and these settings ask for 8 ranks"),
        ({"TLLM_SPAWN_PROXY_PROCESS": "1"}, 4, "TLLM_SPAWN_PROXY_PROCESS_IPC_ADDR is not"),
    ],
)
def test_a_worker_that_cannot_is_told_how_to_start(environ: dict[str, str], gpus: int, told: str) -> None:
    with pytest.raises(EngineStartFailed, match=told):
        check_launch(EIGHT, environ, gpus=gpus)


def test_over_several_nodes_one_task_of_all_is_the_worker(tmp_path: Path) -> None:
    launcher = tmp_path / "trtllm-llmapi-launch"
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)
    command = launch_command(8, "--model", "m")
    assert command[:3] == ("srun", "--mpi=pmix", "--ntasks=8")
    started = command[command.index("trtllm-llmapi-launch") + 1 :]
    assert started == ("headrace", "worker", "--engine", "trtllm", "--model", "m")
    said = []
    for rank in (0, 7):
        environ = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "SLURM_PROCID": str(rank), "SLURM_NTASKS": "8"}
        done = subprocess.run(
            ["trtllm-llmapi-launch", "env"], env=environ, capture_output=True, text=True, timeout=10, check=True
        )
        said.append(done.stdout)
    leader = dict(line.split("=", 1) for line in said[0].splitlines() if "=" in line)
    check_launch(EIGHT, leader, gpus=4)
    assert said[1] == "rank 7: a worker process of the package\n"


def row(active: int, used: int, **fields: object) -> dict[str, object]:
    return {
        "numActiveRequests": active,
        "iterLatencyMS": 20.0,
        "kvCacheStats": {"maxNumBlocks": 100, "usedNumBlocks": used},
        "inflightBatchingStats": {"numCtxTokens": 64, "numGenRequests": active},
        **fields,
    }


def test_the_rows_of_all_ranks_are_added() -> None:
    meter = LoadMeter(2, clock=lambda: 0.0)
    meter.note([row(2, 10, attentionDpRank=0), row(3, 20, attentionDpRank=1)])
    load = meter.read(mine=7, blocks=200, slots=8)
    assert (load.running, load.waiting, load.blocks_used, load.blocks_total) == (5, 2, 30, 200)
    assert (load.step_s, load.step_prefill_tokens, load.step_decodes, meter.blocks) == (0.02, 128, 5, 200)


def test_each_rank_has_its_own_load_and_prompts_without_a_rank_are_shared_out() -> None:
    meter = LoadMeter(2, clock=lambda: 0.0)
    meter.note([row(2, 10, attentionDpRank=0, numQueuedRequests=4), row(3, 20, attentionDpRank=1)])
    meter.queued("a", 100, rank=1)
    meter.queued("b", 50)
    first, second = meter.read(mine=7, blocks=200, slots=8).ranks
    assert (first.running, first.waiting, first.blocks_used, first.blocks_total) == (2, 4, 10, 100)
    assert (second.running, second.blocks_used, second.step_decodes) == (3, 20, 3)
    assert (first.queued_prefill_tokens, second.queued_prefill_tokens) == (25, 125)
    meter.gone("a")
    assert meter.read(mine=7, blocks=200, slots=8).ranks[1].queued_prefill_tokens == 25
    assert [part.blocks_total for part in meter.read(mine=0, blocks=200, slots=8).ranks] == [100, 100]


def test_rows_without_a_rank_stand_for_all_ranks() -> None:
    meter = LoadMeter(2, clock=lambda: 0.0)
    meter.note([row(2, 10)])
    assert (meter.blocks, meter.read(mine=4, blocks=200, slots=8).running) == (200, 4)


def test_stale_rows_do_not_say_what_runs_and_an_idle_engine_has_nothing() -> None:
    now = [0.0]
    meter = LoadMeter(clock=lambda: now[0])
    meter.note([row(1, 5)])
    now[0] = 5.0
    assert meter.read(mine=4, blocks=100, slots=8).running == 4
    assert meter.read(mine=0, blocks=100, slots=8).blocks_used == 0


def test_rows_may_lack_their_parts() -> None:
    meter = LoadMeter(clock=lambda: 0.0)
    meter.note([{"kvCacheStats": None, "inflightBatchingStats": None}, {}])
    assert (meter.blocks, meter.read(mine=2, blocks=9, slots=1).waiting) == (0, 2)


def test_prompts_without_a_token_are_queued() -> None:
    meter = LoadMeter(clock=lambda: 0.0)
    meter.queued("a", 100)
    meter.queued("b", -5)
    assert meter.read(mine=2, blocks=9, slots=1).queued_prefill_tokens == 100
    meter.gone("a")
    meter.gone("a")
    assert meter.read(mine=2, blocks=9, slots=1).queued_prefill_tokens == 0


class Iterator:
    def __init__(self, items: list[Any], end: BaseException | None = None) -> None:
        self.items, self.end, self.marked = items, end, 0

    def mark_undone(self) -> None:
        self.marked += 1

    def __call__(self, timeout: float) -> Iterator:
        return self

    def __aiter__(self) -> Iterator:
        return self

    async def __anext__(self) -> Any:
        if self.items:
            return self.items.pop(0)
        raise self.end or StopAsyncIteration


@pytest.mark.parametrize("end", [None, IndexError(), asyncio.QueueEmpty(), TimeoutError()])
async def test_all_items_are_taken_whatever_ends_them(end: BaseException | None) -> None:
    reports = Iterator([{"a": 1}, [{"b": 2}, {"c": 3}]], end)
    assert await poll_once(reports) == [{"a": 1}, {"b": 2}, {"c": 3}]
    assert reports.marked == 1  # or an iterator of 1.2 would stay ended


async def test_before_the_first_request_there_is_nothing() -> None:
    def ask(timeout: float) -> AsyncIterator[Any]:
        raise AssertionError("KV Event IterationResult is not properly instantiated.")

    assert await poll_once(ask) == []


async def test_a_poll_that_fails_is_tried_again() -> None:
    found: list[Any] = []
    answers: list[Any] = [RuntimeError("broken"), [{"a": 1}, {}]]

    def ask(timeout: float) -> Any:
        answer = answers.pop(0) if answers else []
        if isinstance(answer, Exception):
            raise answer
        return Iterator(answer)

    task = asyncio.create_task(keep_polling(ask, found.extend, lambda: False, what="test"))
    async with asyncio.timeout(5):
        while not found:
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait([task])
    assert found == [{"a": 1}]
