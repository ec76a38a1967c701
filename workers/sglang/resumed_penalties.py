"""Lets SGLang's penalties go on where an interrupted answer stood.

SGLang's presence, frequency and repetition penalties count the tokens that an engine has generated itself. A resumed sequence
has the tokens of its first engine behind its prompt, so a request says how many of its last tokens are those, and these hooks
count them when a batch with it begins. SGLang calls the hooks in its scheduler process (`sglang.srt.plugins`), on any device.
With its overlap schedule SGLang counts each token a step late, so that an answer cannot be resumed exactly there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from headrace.workers.sglang.cpu_plugin.hook import Hook

EMITTED = "headrace_emitted"
"""The entry of `custom_params` with the number of tokens at the end of a request's prompt that were emitted before."""

_LIBRARY = "sglang.srt.sampling.penaltylib"


def emitted_of(requests: list[Any]) -> Iterator[tuple[int, list[int]]]:
    """Yield the rows of a batch that are resumed, each with the tokens that were emitted before."""
    for row, request in enumerate(requests):
        custom = request.sampling_params.custom_params
        count = int(custom.get(EMITTED) or 0) if isinstance(custom, dict) else 0
        if count:
            yield row, list(request.origin_input_ids[-count:])


def counted(kind: str) -> Callable[..., None]:
    """Return the hook behind `_prepare` of the penalizer of this kind."""

    def count(_result: Any, penalizer: Any) -> None:
        import torch

        penalties = getattr(penalizer, f"{kind}_penalties")
        cumulated = getattr(penalizer, f"cumulated_{kind}_penalties")
        for row, tokens in emitted_of(penalizer.orchestrator.reqs()):
            ids = torch.tensor(tokens, dtype=torch.int64, device=cumulated.device)
            if kind == "frequency":  # each time that a token was emitted counts
                cumulated[row].index_add_(0, ids, penalties[row].expand(len(tokens)))
            else:
                cumulated[row, ids] = penalties[row]

    return count


HOOKS = tuple(
    Hook(f"{_LIBRARY}.{kind}_penalty.Batched{kind.title()}Penalizer._prepare", counted(kind), "after")
    for kind in ("presence", "frequency", "repetition")
)
