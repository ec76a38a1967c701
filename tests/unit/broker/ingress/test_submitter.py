"""A payload that is too large for a message is kept for as long as its request may wait."""

from __future__ import annotations

import pytest

from headrace.broker.ingress.submitter import SPILL_TTL_S, Submitter
from headrace.broker.jobs import Job
from headrace.broker.messages import Generation
from headrace.broker.settings import IngressSettings
from headrace.jetstream.subjects import Subjects
from tests.support.frontend.fakes import CARD
from tests.support.memory_store import MemoryMessaging


@pytest.mark.parametrize("deadline_s", [10.0, 86_400.0])
async def test_a_spilled_payload_outlives_the_deadline_of_its_request(deadline_s: float) -> None:
    messaging = MemoryMessaging()
    submitter = Submitter(messaging, Subjects("hr"), IngressSettings(), None)  # type: ignore[arg-type]
    generation = Generation(token_ids=b"")
    job = Job(id="a", card=CARD, generation=generation, prompt_tokens=0, max_tokens=1, deadline_s=deadline_s)
    await submitter.spill(job, b"payload")
    store = messaging.objects("hr_spill")
    messaging.clock.at += max(deadline_s, SPILL_TTL_S - 1)
    assert len(store.names) == 1
    messaging.clock.at += 60
    assert store.names == []
