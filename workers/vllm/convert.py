"""Converts `Sequence` to vLLM's prompt and `SamplingParams`, and vLLM's `RequestOutput` to `Output`.

vLLM is imported inside the functions that build its objects, so that the other direction can be used and tested without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from headrace.broker.messages.frames import TokenLogprob
from headrace.workers.engine import Fault, Output, Sequence, StoredTensor
from headrace.workers.errors import EngineDead, EngineError, EngineOverloaded, RequestInvalid, UnsupportedByEngine
from headrace.workers.kit import GUIDED, GUIDED_OPTIONS, ProcessEngine, end_tokens
from headrace.workers.vllm import transfer_connector

_NATIVE_EXTRA = ("thinking_token_budget", "skip_reading_prefix_cache")
_TRANSFER_EXTRA = (transfer_connector.PARAMS, "ec_transfer_params")
_FINISH: dict[str, Literal["stop", "length", "abort"]] = {
    "stop": "stop",
    "length": "length",
    "abort": "abort",
    "repetition": "stop",
}

TokenBytes = Callable[[int], bytes]


def to_prompt(sequence: Sequence, model: Any = None) -> Any:
    """Build the prompt as vLLM's renderer would, so that nothing is tokenised or templated again.

    `model` is vLLM's model config, needed for embeddings only. Raises RequestInvalid.
    """
    from vllm.inputs import tokens_input

    if sequence.prompt_embeds is not None:
        return _embeds(sequence, sequence.prompt_embeds, model)
    return tokens_input(sequence.token_ids, cache_salt=sequence.cache_salt)


def _embeds(sequence: Sequence, tensor: StoredTensor, model: Any) -> Any:
    """Build a prompt of embeddings in the model's own type, followed by the tokens that an earlier run emitted."""
    import torch
    from vllm.inputs import embeds_input

    rows, width = tensor.shape
    if width != model.get_hidden_size() or rows != sequence.prompt_tokens:
        raise RequestInvalid(
            f"prompt_embeds is {rows} × {width}; the model takes {sequence.prompt_tokens} × {model.get_hidden_size()}",
            param="prompt_embeds",
        )
    given = torch.frombuffer(bytearray(tensor.data), dtype=getattr(torch, tensor.dtype)).reshape(rows, width).to(model.dtype)
    emitted = len(sequence.token_ids) - rows
    if not emitted:
        return embeds_input(given, cache_salt=sequence.cache_salt)
    return embeds_input(
        torch.cat([given, torch.zeros(emitted, width, dtype=model.dtype)]),
        cache_salt=sequence.cache_salt,
        prompt_token_ids=sequence.token_ids,
        is_token_ids=[False] * rows + [True] * emitted,
    )


def eos_ids(llm: Any) -> tuple[int, ...]:
    """Return the end tokens: the tokenizer's first, then the ones that the generation config adds."""
    return end_tokens(llm.renderer.get_eos_token_id(), llm.model_config.try_get_generation_config().get("eos_token_id"))


def to_compute(sequence: Sequence) -> int:
    """Return the number of prompt tokens that this engine will have to compute: one for a fetched prompt."""
    if sequence.handover is not None and sequence.handover.kind == "decode":
        return 1
    return len(sequence.token_ids) - sequence.expected_cached


def to_sampling_params(sequence: Sequence, transfer: Mapping[str, Any] | None = None) -> Any:
    """Build vLLM's `SamplingParams`, with `transfer` as its `kv_transfer_params`. Raises RequestInvalid."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    _check_supported(sequence)
    if sequence.handover is not None and sequence.handover.kind != "decode":
        # one token that is thrown away: nothing the request asks for may end it otherwise, or cost anything
        return SamplingParams(
            temperature=0.0,
            max_tokens=1,
            ignore_eos=True,
            extra_args={transfer_connector.PARAMS: transfer},
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            skip_clone=True,
        )
    sampling = sequence.sampling
    native = {name: sequence.extra[name] for name in _NATIVE_EXTRA if name in sequence.extra}
    opaque = {name: value for name, value in sequence.extra.items() if name not in native}
    if transfer is not None:
        opaque[transfer_connector.PARAMS] = transfer
    try:
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            seed=sampling.seed,
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            ignore_eos=sampling.ignore_eos,
            stop_token_ids=list(sampling.stop_token_ids),
            logit_bias=dict(sampling.logit_bias) or None,
            allowed_token_ids=sampling.allowed_token_ids,
            bad_words=list(sampling.bad_words) or None,
            logprobs=sequence.logprobs,
            prompt_logprobs=sequence.prompt_logprobs,
            structured_outputs=_guided(sequence.guided),
            extra_args=opaque or None,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            skip_clone=True,
            **native,
        )
    except (TypeError, ValueError) as error:
        raise RequestInvalid(str(error)) from error
    except Exception as error:
        invalid = translate_invalid(error)
        if invalid is None:
            raise
        raise invalid from error


def _check_supported(sequence: Sequence) -> None:
    for name in _TRANSFER_EXTRA:
        if name in sequence.extra:
            # they name hosts to read memory from, so they never come from a request
            raise RequestInvalid(f"{name} cannot be given with a request", param=name)


def _guided(guided: Mapping[str, Any] | None) -> Any:
    if guided is None:
        return None
    from vllm.sampling_params import StructuredOutputsParams

    for name in guided:
        if name not in GUIDED and name not in GUIDED_OPTIONS:
            raise RequestInvalid(f"unknown kind of structured output {name!r}; known: {', '.join(sorted(GUIDED))}", param=name)
    return StructuredOutputsParams(**guided)


def translate_invalid(error: BaseException) -> RequestInvalid | None:
    """Return RequestInvalid for an exception that vLLM raises because of the request itself, else None."""
    from vllm.exceptions import VLLMClientError

    if not isinstance(error, VLLMClientError):
        return None
    message = str(error.args[0]) if error.args else str(error)
    return RequestInvalid(message, param=getattr(error, "parameter", None))


def to_output(
    sequence: Sequence,
    result: Any,
    *,
    first: bool,
    eos: frozenset[int],
    token_bytes: TokenBytes,
    local_hits: int | None = None,
    token_ids: list[int] | None = None,
) -> Output:
    """Convert a delta of a sequence. `eos` are the model's own end tokens: ending on them is a plain stop.

    `token_ids`: the prompt as vLLM has it, where that is not the sequence's.

    `local_hits`: tokens of a fetched prompt that were in the local cache; vLLM's own number is about something else then.
    """
    completion = result.outputs[0]
    output = Output(sequence.id, list(completion.token_ids))
    if first:
        output.cached_tokens = (result.num_cached_tokens or 0) if local_hits is None else local_hits
        if result.prompt_logprobs is not None:
            output.prompt_logprobs = to_prompt_logprobs(
                sequence.token_ids if token_ids is None else token_ids,
                result.prompt_logprobs,
                sequence.prompt_logprobs or 0,
                token_bytes,
            )
        if sequence.handover is not None:
            output.extra = _times(result.metrics)
    kind = sequence.handover.kind if sequence.handover is not None else None
    if kind in ("prefill", "lend"):
        return _prefilled(output, result)
    if completion.logprobs:
        output.logprobs = to_logprobs(output.ids, completion.logprobs, sequence.logprobs or 0, token_bytes)
    reason = completion.finish_reason
    if reason is None:
        return output
    finish = _FINISH.get(reason)
    if finish is None and kind == "decode" and first:
        output.fault = Fault("transfer_failed", "vLLM could not fetch the blocks; its own log lines say why", retriable=True)
        return output
    if finish is None:
        output.fault = Fault("engine_error", f"vLLM ended the request with {reason!r}", retriable=True)
        return output
    output.finish = finish
    stop = completion.stop_reason
    if isinstance(stop, int) and (stop not in eos or stop in sequence.sampling.stop_token_ids):
        output.stop = stop
    return output


def _times(metrics: Any) -> dict[str, float] | None:
    """Return a hand-over's seconds in vLLM's queue, including the wait for blocks, and from there to the first token."""
    if metrics is None or not metrics.first_token_ts:
        return None
    return {
        "queued_s": metrics.scheduled_ts - metrics.queued_ts,
        "computed_s": metrics.first_token_ts - metrics.scheduled_ts,
    }


def _prefilled(output: Output, result: Any) -> Output:
    """Convert the answer of a prefill side: its end, and the parameters for the decode side."""
    reason = result.outputs[0].finish_reason
    params = result.kv_transfer_params
    if reason is None:
        return output
    if reason in ("length", "stop") and params:
        output.finish = "length"
        output.handover = transfer_connector.plain(params)
    elif reason == "abort":
        output.finish = "abort"
    else:
        output.fault = Fault("engine_error", f"vLLM ended a prefill with {reason!r} and {params!r}", retriable=True)
    return output


def to_logprobs(ids: list[int], positions: Any, top: int, token_bytes: TokenBytes) -> list[TokenLogprob]:
    """`positions` has one map per id, token -> (logprob, rank); the `top` best become the alternatives, best first."""
    return [_logprob(token, position, top, token_bytes) for token, position in zip(ids, positions, strict=True)]


def to_prompt_logprobs(ids: list[int], positions: Any, top: int, token_bytes: TokenBytes) -> list[TokenLogprob | None]:
    """Convert the positions of a prompt, with the rank of each token; vLLM has none for the first one."""
    return [
        None if position is None else _logprob(token, position, top, token_bytes, rank=position[token].rank or 0)
        for token, position in zip(ids, positions, strict=True)
    ]


def _logprob(token: int, position: Any, top: int, token_bytes: TokenBytes, *, rank: int = 0) -> TokenLogprob:
    best = sorted((entry for entry in position.items() if entry[1].rank is not None), key=lambda entry: entry[1].rank)[:top]
    alternatives = [(int(other), token_bytes(other), float(entry.logprob)) for other, entry in best]
    return TokenLogprob(token, token_bytes(token), float(position[token].logprob), alternatives, rank)


CORE_GONE = "vLLM's engine core is gone; its own log lines say why"


class CoreEngine(ProcessEngine):
    """An engine whose core is vLLM's. A busy core reports its death by itself; an idle one is looked at."""

    LOOK_EVERY_S = 0.2

    def _translate(self, error: BaseException) -> BaseException:
        """Return an exception of vLLM as one of ours; others are returned as they are. One that means death declares it."""
        from vllm.exceptions import GracefulHTTPError
        from vllm.v1.engine.exceptions import EngineDeadError

        if isinstance(error, EngineDeadError):
            self.declare_dead(CORE_GONE)
            return EngineDead(CORE_GONE)
        if isinstance(error, GracefulHTTPError):
            return EngineOverloaded(str(error))
        return translate_invalid(error) or error


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
