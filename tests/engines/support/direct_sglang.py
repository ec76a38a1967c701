"""Asks SGLang's own offline API, in a process without Headrace's engine: reads an order, prints the ids of each answer, or the
vector of each text.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from headrace.workers.engine import EngineConfig
from headrace.workers.sglang.cpu_plugin import stand_in
from headrace.workers.sglang.settings import prepare_environment, server_args

if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    stand_in()


async def answers(order: dict[str, Any]) -> list[Any]:
    from sglang.srt.entrypoints.engine import Engine

    config = EngineConfig(model=order["model"], served_name="direct", args=order["args"])
    engine = Engine(**server_args(config, cpu=True) | {"incremental_streaming_output": False, "enable_metrics": False})
    try:
        if "texts" in order:
            return [made["embedding"] for made in await engine.async_encode(order["texts"])]
        sampling = {"temperature": 0, "max_new_tokens": order["max_tokens"]}
        return [
            (await engine.async_generate(input_ids=prompt, sampling_params=sampling))["output_ids"]
            for prompt in order["prompts"]
        ]
    finally:
        engine.shutdown()


def main() -> None:
    order = json.load(sys.stdin)
    prepare_environment(EngineConfig(model=order["model"], served_name="direct"), os.environ, cpu=True)
    stand_in()
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    print("answers", json.dumps(loop.run_until_complete(answers(order))), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
