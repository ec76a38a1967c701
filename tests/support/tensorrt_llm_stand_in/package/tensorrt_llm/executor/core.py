"""The stand-in's engine: a thread that batches requests step by step, with blocks, events, statistics and hand-overs."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from headrace.workers.sim.settings import timing_model
from headrace.workers.sim.tokens import Vocabulary
from tensorrt_llm.disaggregated_params import DisaggregatedParams
from tensorrt_llm.version import IS_1_3

from .answers import Answer
from .cache import BlockCache
from .result import GenerationResult, Reports, Response
from .utils import RequestError


@dataclass(slots=True)
class Offer:
    """Blocks that a context-only request has left for a generation-only one."""

    prompt: list[int]
    until: float
    state: bytes


OFFERS: dict[int, Offer] = {}
"""Of all engines of this process, by the context request's id."""
_ids_lock = threading.Lock()
_last_id = [0]


@dataclass(slots=True)
class Run:
    result: GenerationResult
    prompt: list[int]
    params: Any
    answer: Answer
    namespace: tuple[Any, ...]
    rank: int
    priority: float
    disagg: Any = None
    out: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    computed: int = 0
    cached: int = 0
    first: list[int] = field(default_factory=list)  # chosen by the context side, to be returned as the first
    logits: list[Any] = field(default_factory=list)

    @property
    def number(self) -> int:
        return self.result.request_id


class Executor:
    """One engine. `options` are the stand-in's own: timing, mean_output_tokens, blocks, faults."""

    def __init__(self, args: Any, vocabulary: Vocabulary, options: Mapping[str, Any]) -> None:
        self._args = args
        self._vocabulary = vocabulary
        self._options = dict(options)
        self._timing = timing_model(self._options.get("timing", "instant"), {})
        cache = args.kv_cache_config
        size = cache.tokens_per_block
        blocks = (cache.max_tokens // size) if cache.max_tokens else int(self._options.get("blocks", 512))
        host = int((cache.host_cache_size or 0) // self._options.get("block_bytes", 1 << 20))
        ranks = args.tensor_parallel_size if args.enable_attention_dp else 1
        self._ranks = [
            BlockCache(blocks, host, size, window=args.max_seq_len or 4096, rank=n if ranks > 1 else None) for n in range(ranks)
        ]
        told = cache.enable_block_reuse and cache.event_buffer_max_size > 0
        self.kv_reports: Reports | None = Reports(cache.event_buffer_max_size) if told else None
        self.stats_reports = Reports(getattr(args, "max_stats_len", None) or 1000)
        self._waiting: list[Run] = []
        self._running: list[Run] = []
        self._aborted: set[int] = set()
        self._completed = 0
        self._iteration = 0
        self.submitted = False
        self._shut = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._loop, name="stand-in-executor", daemon=True)
        self._thread.start()

    # -- called by the application ---------------------------------------------------------------------------

    def is_shutdown(self) -> bool:
        return self._shut

    def submit(
        self,
        prompt: list[int],
        params: Any,
        *,
        streaming: bool,
        lora: Any,
        disagg: Any,
        rank: int | None,
        salt: str | None,
        priority: float,
    ) -> GenerationResult:
        with _ids_lock:
            _last_id[0] += 1
            number = _last_id[0]
        result = GenerationResult(number, prompt, params, streaming=streaming, abort=self.abort_request)
        self.submitted = True
        try:
            run = self._run(result, prompt, params, lora, disagg, rank, salt, priority)
        except RequestError as error:
            result.put(Response(error=error))
            return result
        for reports in (self.kv_reports, self.stats_reports):
            if reports is not None:
                reports.done = False
        with self._wake:
            self._waiting.append(run)
            self._waiting.sort(key=lambda one: -one.priority)
            self._wake.notify()
        return result

    def _run(
        self,
        result: GenerationResult,
        prompt: list[int],
        params: Any,
        lora: Any,
        disagg: Any,
        rank: int | None,
        salt: str | None,
        priority: float,
    ) -> Run:
        number = lora.lora_int_id if lora is not None else None
        answer = Answer(self._vocabulary, prompt, params, number, float(self._options.get("mean_output_tokens", 0)))
        place = rank if rank is not None else result.request_id % len(self._ranks)
        run = Run(result, prompt, params, answer, (number, salt), place, priority, disagg)
        if disagg is not None and disagg.request_type == "generation_only":
            offer = OFFERS.pop(disagg.ctx_request_id, None)
            if offer is None or offer.until < time.monotonic():
                raise RequestError(f"the context side keeps nothing for request {disagg.ctx_request_id}")
            if offer.state != disagg.opaque_state or offer.prompt != prompt:
                raise RequestError("the opaque state does not fit")
            run.first = list(disagg.first_gen_tokens)
        return run

    def abort_request(self, number: int) -> None:
        OFFERS.pop(number, None)
        with self._wake:
            self._aborted.add(number)
            self._wake.notify()

    def shutdown(self) -> None:
        with self._wake:
            self._shut = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(5)

    def die(self, why: str) -> None:
        """End as an engine does of which a process has failed."""
        with self._wake:
            self._shut = True
            for run in [*self._running, *self._waiting]:
                run.result.put(Response(error=RuntimeError(why)))
            self._running.clear()
            self._waiting.clear()
            self._wake.notify()

    def lose_events(self, count: int) -> None:
        """Have numbers of KV events missing, as after an overflow of the buffer."""
        for cache in self._ranks:
            cache.skip_events(count)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    # -- the thread ------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while True:
            with self._wake:
                while not (self._shut or self._running or self._waiting or self._aborted):
                    self._wake.wait()
                if self._shut:
                    return
                self._cancel()
                duration = self._step()
            time.sleep(duration)

    def _cancel(self) -> None:
        for run in [one for one in [*self._running, *self._waiting] if one.number in self._aborted]:
            self._end(run)
            run.result.put(Response(finish="cancelled"))
        self._aborted.clear()

    def _end(self, run: Run) -> None:
        cache = self._ranks[run.rank]
        if run in self._running:
            self._running.remove(run)
            cache.private -= 1
            cache.release(run.held)
        else:
            self._waiting.remove(run)
        self._completed += 1

    def _step(self) -> float:
        began = time.monotonic()
        decoding = list(self._running)
        budget = int(self._args.max_num_tokens) - len(decoding)
        prefilled = 0
        fresh: list[Run] = []
        most = int(self._args.max_batch_size) * len(self._ranks)
        while self._waiting and len(self._running) < most and prefilled < budget:
            run = self._waiting[0]
            if run.computed == 0:
                run.held = self._ranks[run.rank].hold_prefix(run.prompt, run.namespace)
                run.cached = run.computed = len(run.held) * self._ranks[run.rank].size
                if run.first:
                    run.computed = len(run.prompt) - 1  # fetched
            part = min(len(run.prompt) - run.computed, budget - prefilled)
            run.computed += part
            prefilled += part
            if run.computed == len(run.prompt):
                self._waiting.pop(0)
                self._ranks[run.rank].private += 1
                self._running.append(run)
                fresh.append(run)
        for run in [*decoding, *fresh]:
            self._emit(run, first=run in fresh)
        duration = self._timing.step_s(prefill_tokens=prefilled, sequences=len(decoding), context_tokens=0)
        self._report(decoding, fresh, prefilled, max(duration, time.monotonic() - began))
        return duration

    def _emit(self, run: Run, *, first: bool) -> None:
        cache = self._ranks[run.rank]
        response = Response(cached=run.cached)
        if first:
            run.held = cache.store(run.prompt, run.namespace, run.held, final=False)
            for token in run.first:
                run.answer.skip(token)
                run.out.append(token)
                response.tokens.append(token)
        faults = self._options.get("faults", {})
        if faults.get("fail_at_token") == len(run.out):
            self._end(run)
            run.result.put(Response(error=RequestError("injected: the request has failed")))
            return
        token, logits = run.answer.next(run.number, [*run.prompt, *run.out])
        run.out.append(token)
        response.tokens.append(token)
        if run.params.logprobs:
            response.logprobs = [run.answer.logprobs(one) for one in response.tokens]
        if run.params.return_generation_logits and logits is not None:
            run.logits.append(logits[0, 0])
        self._finish(run, response, token)
        run.result.put(response)

    def _finish(self, run: Run, response: Response, token: int) -> None:
        params = run.params
        if run.disagg is not None and run.disagg.request_type == "context_only":
            response.finish = "not_finished" if IS_1_3 else "length"
            response.disagg = self._offer(run)
        elif token == params.end_id and not params.ignore_eos:
            response.finish = "stop"
            if self._options.get("leaves_end_out"):
                response.tokens.pop()
                response.logprobs = response.logprobs[: len(response.tokens)]
        elif token in (params.stop_token_ids or ()) and len(run.out) >= (params.min_tokens or 0):
            response.finish, response.stop = "stop", token
            if not params.include_stop_str_in_output:
                response.tokens.pop()
        elif len(run.out) >= params.max_tokens:
            response.finish = "length"
        if response.finish is not None:
            response.logits = run.logits or None
            cache = self._ranks[run.rank]
            run.held = cache.store([*run.prompt, *run.out[:-1]], run.namespace, run.held, final=True)
            self._end(run)

    def _offer(self, run: Run) -> Any:
        state = blake2b(repr((run.number, run.prompt)).encode(), digest_size=16).digest()
        config = self._args.cache_transceiver_config
        keeps = (getattr(config, "kv_transfer_timeout_ms", None) or 60_000) / 1000
        OFFERS[run.number] = Offer(run.prompt, time.monotonic() + keeps, state)
        fields: dict[str, Any] = {"ctx_dp_rank": run.rank, "disagg_request_id": run.number} if IS_1_3 else {}
        return DisaggregatedParams(
            request_type="context_only",
            first_gen_tokens=list(run.out),
            ctx_request_id=run.number,
            opaque_state=state,
            **fields,
        )

    def _report(self, decoding: list[Run], fresh: list[Run], prefilled: int, duration: float) -> None:
        if self.kv_reports is not None:
            for cache in self._ranks:
                self.kv_reports.items.extend(cache.take_events())
        if not self._args.enable_iter_perf_stats:
            return
        self._iteration += 1
        for rank, cache in enumerate(self._ranks if IS_1_3 else self._ranks[:1]):  # 1.2 tells of rank 0 alone
            mine = [run for run in self._running if run.rank == rank]
            row: dict[str, Any] = {
                "timestamp": "",
                "iter": self._iteration,
                "iterLatencyMS": duration * 1000,
                "numActiveRequests": len(mine),
                "numQueuedRequests": len(self._waiting) if rank == 0 else 0,
                "numCompletedRequests": self._completed,
                "maxNumActiveRequests": self._args.max_batch_size,
                "kvCacheStats": {
                    "maxNumBlocks": cache.capacity,
                    "freeNumBlocks": cache.capacity - cache.used,
                    "usedNumBlocks": cache.used,
                    "tokensPerBlock": cache.size,
                },
                "inflightBatchingStats": {
                    "numScheduledRequests": len(mine),
                    "numContextRequests": sum(run.rank == rank for run in fresh),
                    "numGenRequests": sum(run.rank == rank for run in decoding),
                    "numPausedRequests": 0,
                    "numCtxTokens": prefilled if rank == 0 else 0,
                },
                "specDecodingStats": None,
            }
            if IS_1_3:
                row |= {"attentionDpRank": rank, "statsSequence": self._iteration, "statsDroppedFrames": 0}
            self.stats_reports.items.append(row)
