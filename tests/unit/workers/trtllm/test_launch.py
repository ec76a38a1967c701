"""Engines of several GPUs and nodes: which process is the worker, and how it is started."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from headrace.workers.errors import EngineStartFailed
from headrace.workers.trtllm.launch import attention_ranks, check_launch, launch_command, shared_by, world_size

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
