"""Checks that an engine of several GPUs is started in the way that TensorRT-LLM needs.

On one node it starts a process per GPU by itself. Over several nodes, `trtllm-llmapi-launch` starts one task per GPU by MPI or
Slurm: the task of rank 0 runs the worker, with the variables below; all others run TensorRT-LLM's own processes and never
become workers of Headrace.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.workers.engine import several
from headrace.workers.errors import EngineStartFailed

SPAWNED = "TLLM_SPAWN_PROXY_PROCESS"
ADDRESS = "TLLM_SPAWN_PROXY_PROCESS_IPC_ADDR"
SIZE = "tllm_mpi_size"
LAUNCHER = "trtllm-llmapi-launch"
_RANKS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMI_ID")  # in the order in which the launcher reads them


def world_size(args: Mapping[str, Any]) -> int:
    """Return the number of GPUs, and so of processes, that these settings ask for."""
    size = 1
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"):
        size *= int(args.get(name) or 1)
    return size


def attention_ranks(args: Mapping[str, Any]) -> int:
    """Return the number of attention data-parallel ranks, each with a KV cache of its own."""
    return int(args.get("tensor_parallel_size") or 1) if args.get("enable_attention_dp") else 1


def shared_by(args: Mapping[str, Any]) -> dict[str, int]:
    """Return the ranks that share the model, by kind."""
    kinds = {"tensor": "tensor", "pipeline": "pipeline", "context": "context", "expert": "moe_expert"}
    return several(**{kind: int(args.get(f"{name}_parallel_size") or 1) for kind, name in kinds.items()})


def launch_command(world: int, *worker: str) -> tuple[str, ...]:
    """Return the command that starts a worker over several nodes by Slurm."""
    return ("srun", "--mpi=pmix", f"--ntasks={world}", LAUNCHER, "headrace", "worker", "--engine", "trtllm", *worker)


def check_launch(args: Mapping[str, Any], environ: Mapping[str, str], *, gpus: int | None) -> None:
    """Raise EngineStartFailed where this process cannot start the ranks that its settings ask for.

    `gpus`: those of this machine, None where that is not known.
    """
    world = world_size(args)
    if world == 1:
        return
    if environ.get(SPAWNED) == "1":
        tasks = environ.get(SIZE, "")
        if tasks.isdigit() and int(tasks) != world:
            raise EngineStartFailed(
                f"{LAUNCHER} runs {tasks} tasks, and these settings ask for {world} ranks "
                "(tensor × pipeline × context parallel)"
            )
        if not environ.get(ADDRESS):
            raise EngineStartFailed(f"{SPAWNED} is set and {ADDRESS} is not: start the worker by {LAUNCHER}")
        return
    rank = next((environ[name] for name in _RANKS if environ.get(name)), "0")
    if rank != "0":
        raise EngineStartFailed(
            f"this is task {rank} of an MPI job, and only rank 0 of an engine is a worker; start it so: "
            + " ".join(launch_command(world))
        )
    if gpus is not None and gpus < world:
        raise EngineStartFailed(
            f"these settings ask for {world} GPUs and this machine has {gpus}; over several machines start it so: "
            + " ".join(launch_command(world))
        )
