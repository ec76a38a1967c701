"""How far ranks that are engines of their own go with vLLM 0.32 and its CPU build. Nothing is started here.

Where one of these fails after an update of vLLM, what docs/engines.md says of ranks is to be tried again.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.workers.engine import EngineConfig
from headrace.workers.vllm.settings import engine_args

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]  # vLLM and torch warn about themselves


@pytest.mark.parametrize("external", [{"data_parallel_rank": 0}, {"data_parallel_external_lb": True}], ids=["rank", "external"])
def test_vllm_refuses_them_for_a_dense_model_and_says_to_start_engines_without_them(
    model_dir: Path, external: dict[str, object]
) -> None:
    config = EngineConfig(model=str(model_dir), served_name="m", args={"data_parallel_size": 2, **external})
    with pytest.raises(ValueError, match="launch independent vLLM instances without"):
        engine_args(config).create_engine_config()


def test_the_cpu_build_lacks_both_exchanges_that_experts_on_several_ranks_need() -> None:
    from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    for name in ("all_gatherv", "reduce_scatterv"):
        assert getattr(CpuCommunicator, name) is getattr(DeviceCommunicatorBase, name)
        with pytest.raises(NotImplementedError):
            getattr(CpuCommunicator, name)(None, None)
