"""Lends the prefix of a prompt that a decode worker has cached to the prefill worker, which reads it instead of computing it.

The engine computes the prefix and a token more once again, which its cache makes one token, and keeps the blocks for a lease.
They are released when the prefill worker has done its job. After a job that failed they stay to the end of the lease: the
prefill worker may still be reading, and would take whatever is written there next for its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
import structlog

from headrace.workers import metrics
from headrace.workers.engine import EngineInfo, Handover, Output
from headrace.workers.handover.prefill_side import RawSequences
from headrace.workers.runtime.choice import ChoiceRun

log = structlog.get_logger()

LEAST_TOKENS = 64
"""Fewer are computed sooner than they are read; vLLM reads no fewer either (`kv_recompute_threshold`)."""
WITHIN_S = 2.0
"""Seconds that a request waits for the engine to lend; it takes a step."""


class PrefixLender:
    """Lends prefixes of prompts. Without `EngineInfo.lends` it lends nothing."""

    def __init__(self, raw: RawSequences, info: EngineInfo) -> None:
        self._raw = raw
        self._info = info

    async def lend(self, choice: ChoiceRun) -> Mapping[str, Any] | None:
        """Lend the whole blocks of a choice's prompt that the cache has. Returns their parameters, None if there are none."""
        size = self._info.block_size
        whole = (choice.tokens - choice.uncached) // size * size
        if not self._info.lends or whole < max(LEAST_TOKENS, size) or choice.generation.media:
            return None
        sequence = choice.sequence(Handover(kind="lend"))
        sequence = msgspec.structs.replace(
            sequence,
            id=_loan(choice),
            token_ids=sequence.token_ids[: whole + 1],
            prompt_tokens=whole + 1,
            sampling=msgspec.structs.replace(sequence.sampling, max_tokens=1, min_tokens=0, stop_token_ids=[], seed=None),
            logprobs=None,
            guided=None,
            expected_cached=whole,
        )
        ended: asyncio.Future[Output] = asyncio.get_running_loop().create_future()

        def on_output(output: Output) -> None:
            if (output.finish is not None or output.fault is not None) and not ended.done():
                ended.set_result(output)

        self._raw.submit_raw(sequence, on_output)
        try:
            async with asyncio.timeout(WITHIN_S):
                output = await ended
        except TimeoutError:
            self.release(choice)
            self._not_lent(choice, f"the engine lent nothing within {WITHIN_S:g} s")
            return None
        except asyncio.CancelledError:
            self.release(choice)
            raise
        if output.fault is not None or output.handover is None:
            self._not_lent(choice, output.fault.message if output.fault is not None else "it ended without parameters")
            return None
        metrics.PREFIX_LOANS.labels("lent").inc()
        return output.handover

    def release(self, choice: ChoiceRun) -> None:
        """Take back what was lent for a choice. Only when it is read no more."""
        self._raw.abort_raw(_loan(choice))

    def _not_lent(self, choice: ChoiceRun, why: str) -> None:
        metrics.PREFIX_LOANS.labels("failed").inc()
        log.warning("prefix.not_lent", request_id=choice.run.id, why=why)


def _loan(choice: ChoiceRun) -> str:
    return f"{choice.id}~lent"
