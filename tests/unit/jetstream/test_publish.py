"""Answers that are waited for together: the wait ends with the last of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from headrace.jetstream.errors import NoLeader, PublishUnknown
from headrace.jetstream.ports import PubAck
from headrace.jetstream.publish import AGAIN_S, AckGroup, Mux


async def test_the_wait_ends_with_the_last_outcome() -> None:
    group = AckGroup[int]()
    first, second = group.part(), group.part()
    waiting = asyncio.create_task(group.all())
    await asyncio.sleep(0)
    first.set_result(1)
    await asyncio.sleep(0)
    assert not waiting.done()
    second.set_exception(error := ValueError("no"))
    await waiting
    assert (first.outcome, second.outcome) == (1, error)
    assert first.done()
    assert second.done()


async def test_what_has_its_outcomes_is_not_waited_for() -> None:
    group = AckGroup[int]()
    await group.all()
    group.part().set_result(1)
    await group.all()


async def test_an_outcome_after_the_wait_was_given_up_is_fine() -> None:
    group = AckGroup[int]()
    part = group.part()
    waiting = asyncio.create_task(group.all())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    part.set_result(1)
    assert part.outcome == 1


ID = {"Nats-Msg-Id": "m1"}
NO_LEADER = {"error": {"code": 503, "err_code": 10008, "description": "JetStream system temporarily unavailable"}}
BEING_STORED = {"error": {"code": 409, "err_code": 10158, "description": "duplicate message id is in process"}}
STORED = {"stream": "S", "seq": 7}


class Core:
    """A connection whose server answers what the test says: to the n-th copy, or to none."""

    max_payload = 1_000_000
    up = True

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.answers: dict[int, dict[str, Any]] = {}
        self._taps: dict[str, Callable[..., None]] = {}

    def tap(self, subject: str, callback: Callable[..., None]) -> None:
        self._taps[subject.removesuffix("*")] = callback

    def send_now(self, cmd: bytes) -> bool:
        self.sent.append(cmd)
        answer = self.answers.get(len(self.sent), self.answers.get(0))
        if answer is not None:
            reply = cmd.split(b"\r\n", 1)[0].split()[2]
            asyncio.get_running_loop().call_soon(self._tell, reply, json.dumps(answer).encode())
        return True

    def _tell(self, reply: bytes, data: bytes) -> None:
        (told,) = [callback for prefix, callback in self._taps.items() if reply.startswith(prefix.encode())]
        told(reply, b"", data, None)

    def forge(self, reply: str) -> None:
        """Send an answer as another process would."""
        self._tell(reply.encode(), b"forged")


async def published(core: Core, headers: dict[str, str], *, timeout_s: float = 5.0, break_first: bool = False) -> PubAck:
    """Publish. `break_first`: the connection breaks after the first copy was sent, and is there again at once."""
    mux = Mux(core, "inbox")  # type: ignore[arg-type]
    mux.up()
    if break_first:
        asyncio.get_running_loop().call_soon(lambda: (mux.down(), mux.up()))
    try:
        return await mux.publish("a.b", b"body", dict(headers), timeout_s=timeout_s)
    finally:
        assert mux._calls == {}


async def test_a_message_that_is_being_stored_is_asked_for_again_and_is_no_refusal() -> None:
    """The cluster has taken an earlier copy and not confirmed it yet: a caller that sent it again must not be told no."""
    core = Core()
    core.answers = {1: BEING_STORED, 2: BEING_STORED, 3: {**STORED, "duplicate": True}}
    ack = await published(core, ID)
    assert (ack.seq, ack.duplicate) == (7, True)
    core.answers = {0: BEING_STORED}
    with pytest.raises(PublishUnknown, match="being stored"):
        await published(core, ID, timeout_s=0.2)


async def test_a_refusal_says_that_nothing_is_stored_unless_a_copy_was_on_its_way_before() -> None:
    core = Core()
    core.answers = {0: NO_LEADER}
    with pytest.raises(NoLeader):
        await published(core, ID, timeout_s=0.2)
    broken = Core()
    broken.answers = dict.fromkeys(range(2, 50), NO_LEADER)
    with pytest.raises(PublishUnknown):
        await published(broken, ID, timeout_s=0.2, break_first=True)


async def test_what_has_no_answer_is_sent_again_under_its_id_and_its_refusal_is_no_word_that_it_is_not_stored() -> None:
    """Whom the first copy went to may be gone. It may be stored as well: so the refusal of a later copy says nothing of it."""
    core = Core()
    core.answers = {2: STORED}
    mux = Mux(core, "inbox")  # type: ignore[arg-type]
    mux.up()
    publishing = asyncio.ensure_future(mux.publish("a.b", b"body", dict(ID), timeout_s=30.0))
    await asyncio.sleep(0)
    for now in (100.0, 100.0 + AGAIN_S - 0.01):
        mux.repeat_unanswered(now)
        assert len(core.sent) == 1
    mux.repeat_unanswered(100.0 + AGAIN_S)
    assert (await publishing).seq == 7
    assert core.sent[0] == core.sent[1]
    assert len(core.sent) == 2

    core.answers = dict.fromkeys(range(4, 99), NO_LEADER)
    publishing = asyncio.ensure_future(mux.publish("a.b", b"body", dict(ID), timeout_s=0.2))
    await asyncio.sleep(0)
    for now in (200.0, 201.0):
        mux.repeat_unanswered(now)
    with pytest.raises(PublishUnknown):
        await publishing


async def test_it_is_known_for_how_long_nothing_was_stored_although_it_was_tried() -> None:
    """A server that a partition has left in the minority refuses or leaves unanswered; one stored message ends that time."""
    core = Core()
    mux = Mux(core, "inbox")  # type: ignore[arg-type]
    mux.up()
    loop = asyncio.get_running_loop()
    waiting = asyncio.ensure_future(mux.publish("a.b", b"body", dict(ID), timeout_s=0.5))
    await asyncio.sleep(0)
    assert mux.unstored_s(loop.time() + 5.0) > 4.9
    core.answers = {0: NO_LEADER}
    for failing in (waiting, mux.publish("a.b", b"body", dict(ID), timeout_s=0.5)):
        with pytest.raises((NoLeader, PublishUnknown)):
            await failing
    assert 0.4 < mux.unstored_s(loop.time() + 60.0) < 5.0, "the time in which nothing is tried does not count"
    core.answers = {0: STORED}
    await mux.publish("a.b", b"body", dict(ID), timeout_s=5.0)
    assert mux.unstored_s(loop.time()) == 0.0


async def test_what_must_not_be_done_twice_is_not_sent_again() -> None:
    core = Core()
    mux = Mux(core, "inbox")  # type: ignore[arg-type]
    mux.up()
    waiting = [
        asyncio.ensure_future(mux.publish("a.b", b"without an id", {}, timeout_s=30.0)),
        asyncio.ensure_future(mux.request("a.b", b"of another process", timeout_s=30.0, shown=True)),
        asyncio.ensure_future(mux.request("a.b", b"a change", timeout_s=30.0)),
        asyncio.ensure_future(mux.request("a.b", b"a question", timeout_s=30.0, repeated=True)),
    ]
    await asyncio.sleep(0)
    for now in (100.0, 101.0):
        mux.repeat_unanswered(now)
    assert [cmd.split(b"\r\n")[1] for cmd in core.sent[4:]] == [b"a question"]
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)


async def test_questions_to_other_processes_are_answered_where_only_the_asked_one_knows_and_the_server_elsewhere() -> None:
    core = Core()
    mux = Mux(core, "inbox", shown="other")  # type: ignore[arg-type]
    asking = [asyncio.ensure_future(mux.request("a.b", b"", timeout_s=30.0, shown=shown)) for shown in (True, True, False)]
    await asyncio.sleep(0)
    one, two, server = (cmd.split()[2].decode() for cmd in core.sent)
    assert one.startswith("other.q.")
    assert server == "inbox.a.1"
    for guess in ("other.q.1", "other.q.q1", f"inbox.a.q{two.rpartition('.')[2][:-1]}", f"{one}0", one.replace("q.", "q.q")):
        core.forge(guess)
    await asyncio.sleep(0)
    assert not any(each.done() for each in asking)
    for reply, each in zip((one, two, server), asking, strict=True):
        core.forge(reply)
        assert (await each).data == b"forged"
