"""Bodies that arrive slowly hold a bounded memory, in all and for each address."""

from __future__ import annotations

import pytest

from headrace.frontend.errors import BodiesFull
from headrace.frontend.http.body_budget import FREE_BYTES, BodyBudget


def test_a_body_gives_back_all_that_it_held_however_it_ended() -> None:
    seen: list[float] = []
    budget = BodyBudget(1000, seen.append)
    share = budget.share("a")
    share.add(FREE_BYTES)
    assert budget.held == 0, "the first bytes of a body are free"
    share.add(300)
    share.add(100)
    assert budget.held == 400
    share.close()
    share.close()
    assert (budget.held, seen) == (0, [300, 400, 0])


def test_an_address_gets_half_and_all_together_get_the_budget() -> None:
    budget = BodyBudget(1000)
    shares = {peer: budget.share(peer) for peer in "abc"}
    for share in shares.values():
        share.add(FREE_BYTES)
    shares["a"].add(500)
    with pytest.raises(BodiesFull, match="this address"):
        budget.share("a").add(FREE_BYTES + 1)
    shares["b"].add(500)
    with pytest.raises(BodiesFull, match="1000 of 1000") as caught:
        shares["c"].add(1)
    assert (caught.value.status, caught.value.retry_after_s) == (503, 1.0)
    shares["a"].close()
    shares["c"].add(1)


def test_an_ordinary_request_is_served_while_the_budget_is_used_up() -> None:
    budget = BodyBudget(100)
    for peer in "ab":
        budget.share(peer).add(FREE_BYTES + 50)
    budget.share("a").add(FREE_BYTES)
