"""With `ignore_eos` a sequence still ends at its own stop tokens, which SGLang then does not look at."""

from __future__ import annotations

import pytest

from headrace.broker.messages import Sampling
from headrace.workers.engine import Output
from headrace.workers.sglang.stop_tokens import StopTokens


def ended(chunks: list[list[int]], **sampling: object) -> list[Output]:
    """The outputs up to the one that ends."""
    stop_tokens, outputs = StopTokens(Sampling(**sampling)), []  # type: ignore[arg-type]
    for ids in chunks:
        outputs.append(Output("s", list(ids)))
        if stop_tokens.end(outputs[-1]):
            break
    return outputs


def test_the_stop_token_is_the_last_one() -> None:
    outputs = ended([[5], [6, 9, 7], [8]], ignore_eos=True, stop_token_ids=[9])
    assert [(output.ids, output.finish, output.stop) for output in outputs] == [([5], None, None), ([6, 9], "stop", 9)]


@pytest.mark.parametrize(("least", "ends"), [(0, 1), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_none_ends_a_sequence_before_its_least_number_of_tokens(least: int, ends: int) -> None:
    outputs = ended([[5, 9], [6, 9], [9], [1]], ignore_eos=True, stop_token_ids=[9], min_tokens=least)
    assert len(outputs) == ends


def test_logprobs_end_with_the_tokens() -> None:
    output = Output("s", [5, 9, 7], logprobs=["a", "b", "c"])  # type: ignore[list-item]
    assert StopTokens(Sampling(ignore_eos=True, stop_token_ids=[9])).end(output)
    assert output.logprobs == ["a", "b"]


def test_what_sglang_heeds_itself_is_left_to_it() -> None:
    assert [output.finish for output in ended([[5], [9], [7]], stop_token_ids=[9])] == [None, None, None]
