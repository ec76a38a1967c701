"""The operations of a started vLLM beside those of adapters: prefix cache, pause, sleep and profiler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.workers.errors import EngineError, RequestInvalid, UnsupportedByEngine

PROFILE_OPERATIONS = frozenset({"start_profile", "stop_profile"})
SLEEP_OPERATIONS = frozenset({"sleep", "wake"})
OPERATIONS = frozenset({"reset_prefix_cache", "pause", "resume", "is_paused"}) | PROFILE_OPERATIONS | SLEEP_OPERATIONS


class VllmOperations:
    """Runs the operations of one vLLM. `able` are those that it was started for, `asleep` is the level of its sleep."""

    def __init__(self, llm: Any, *, cpu: bool) -> None:
        """`cpu`: vLLM computes without a GPU. There it goes through a sleep, and frees nothing."""
        config = llm.vllm_config
        self._llm = llm
        self._cpu = cpu
        self._tiers = getattr(config.kv_transfer_config, "kv_connector", None) == "OffloadingConnector"
        self.asleep = 0
        self.sleep_levels = _sleep_levels(config, cpu=cpu)
        profiles = config.profiler_config.profiler is not None
        self.able = OPERATIONS - (frozenset() if profiles else PROFILE_OPERATIONS)
        self.able -= frozenset() if self.sleep_levels else SLEEP_OPERATIONS

    async def do(self, op: str, args: Mapping[str, Any]) -> Mapping[str, Any]:
        """Run an operation. Raises UnsupportedByEngine for an unknown one, or what vLLM raises."""
        if op not in self.able:
            raise UnsupportedByEngine(f"this vLLM has no operation {op!r}; it has: {', '.join(sorted(self.able))}")
        match op:
            case "sleep":
                return await self._sleep(int(args.get("level", 1)))
            case "wake":
                return await self._wake()
            case "pause":
                given = {"mode": "keep", "clear_cache": False, **args}
                return {"result": await self._llm.pause_generation(**given)}
            case "resume":
                return {"result": await self._llm.resume_generation()}
            case "is_paused":
                return {"result": await self._llm.is_paused()}
            case "reset_prefix_cache":
                return {"result": await self._reset_cache(args)}
            case "start_profile":
                await self._llm.start_profile(**args)
            case _:
                await self._llm.stop_profile()
        return {"folder": self._llm.vllm_config.profiler_config.torch_profiler_dir}

    async def _reset_cache(self, args: Mapping[str, Any]) -> bool:
        """Empty the cache, with its host tier: the event that follows says that all is gone.

        vLLM would empty the host tier even where the device's blocks are in use and stay, and would not tell.
        """
        done: bool = await self._llm.reset_prefix_cache(**args)
        if done and self._tiers and "reset_connector" not in args:
            done = await self._llm.reset_prefix_cache(**args, reset_connector=True)
        return done

    async def _sleep(self, level: int) -> Mapping[str, Any]:
        if level not in self.sleep_levels:
            raise RequestInvalid(f"sleep: this vLLM has no level {level}; it has {', '.join(map(str, self.sleep_levels))}")
        if self.asleep:
            raise EngineError(f"this vLLM sleeps already (level {self.asleep}); wake it first")
        self.asleep = level  # from now on sequences are refused: vLLM would queue them
        try:
            await self._llm.sleep(level)
        except Exception:
            self.asleep = 0
            raise
        return {"level": level}

    async def _wake(self) -> Mapping[str, Any]:
        if not self.asleep:
            return {"level": 0}
        if self.asleep == 1 or self._cpu:  # without a GPU the weights have stayed where they were
            await self._llm.wake_up()
        else:
            await self._llm.wake_up(["weights"])
            await self._llm.collective_rpc("reload_weights")
            await self._llm.wake_up(["kv_cache"])
        self.asleep = 0
        return {"level": 0}


def _sleep_levels(config: Any, *, cpu: bool) -> tuple[int, ...]:
    """Return the levels of sleep that vLLM was started for.

    On a GPU that takes its sleep mode. Memory that NIXL has registered, or that tiers copy, must stay where it is, and after
    level 2 only the model's own weights are read again, not those of adapters.
    """
    if cpu:
        return (1, 2)
    if not config.model_config.enable_sleep_mode or config.kv_transfer_config is not None:
        return ()
    return (1,) if config.lora_config is not None else (1, 2)
