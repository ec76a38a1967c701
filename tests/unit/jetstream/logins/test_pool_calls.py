"""Calls that a steward makes for logins of a pool: what touches another pool is refused before it is done or told."""

from __future__ import annotations

from typing import Any, cast

import pytest

from headrace.jetstream.core.api import MESSAGE_NOT_FOUND, ApiError, ApiFault, JsApi
from headrace.jetstream.logins.permissions import Permissions, permissions
from headrace.jetstream.logins.pool_calls import PAGE, NotTheirs, PoolCalls
from headrace.jetstream.logins.roles import Login
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology

ALLOWED = permissions(Topology(Subjects("hr")), Login("worker", "a"))
ROUTER = permissions(Topology(Subjects("hr")), Login("router", "a"))


class FakeApi:
    """A stream WORK with messages by sequence, and consumers with their filters; it notes the calls that change something."""

    def __init__(self) -> None:
        self.messages = {1: "hr.work.a.w1", 2: "hr.work.b.w2", 3: "hr.work.a.w3"}
        self.consumers: dict[str, dict[str, Any]] = {
            "W_w1": {"filter_subject": "hr.work.a.w1"},
            "W_w2": {"filter_subject": "hr.work.b.w2"},
            "both": {"filter_subjects": ["hr.work.a.w1", "hr.work.b.w2"]},
            "all": {},
        }
        self.changed: list[str] = []

    async def call(self, call: str, body: Any = None) -> dict[str, Any]:
        if call.startswith("STREAM.MSG.GET"):
            subject = self.messages.get(body["seq"])
            if subject is None:
                raise ApiError(ApiFault(404, MESSAGE_NOT_FOUND[0], "no message found"), call)
            return {"message": {"subject": subject, "seq": body["seq"], "data": "cHJvbXB0"}}
        if call.startswith("STREAM.INFO"):
            return {"config": {}, "asked": body}
        if call.startswith("CONSUMER.INFO"):
            return {"config": self.consumers[call.rpartition(".")[2]]}
        if call.startswith("CONSUMER.LIST"):
            names = list(self.consumers)[body["offset"] : body["offset"] + PAGE]
            page = [{"name": name, "config": self.consumers[name]} for name in names]
            return {"total": len(self.consumers), "offset": body["offset"], "limit": PAGE, "consumers": page}
        self.changed.append(call)
        return {"success": True}


async def make(api: FakeApi, call: str, body: Any = None, allowed: Permissions = ALLOWED) -> dict[str, Any]:
    return await PoolCalls(cast("JsApi", api)).make(allowed, call, body)


async def test_messages_of_the_pool_are_read_and_those_of_another_one_are_not() -> None:
    api = FakeApi()
    assert (await make(api, "STREAM.MSG.GET.HR_WORK", {"seq": 1}))["message"]["subject"] == "hr.work.a.w1"
    assert await make(api, "STREAM.MSG.GET.HR_WORK", {"seq": 3, "next_by_subj": "hr.work.a.w3"})
    with pytest.raises(NotTheirs, match="not one of its pool"):
        await make(api, "STREAM.MSG.GET.HR_WORK", {"seq": 2})
    with pytest.raises(ApiError):
        await make(api, "STREAM.MSG.GET.HR_WORK", {"seq": 9})


async def test_messages_of_the_pool_are_deleted_and_those_of_another_one_are_not() -> None:
    api = FakeApi()
    await make(api, "STREAM.MSG.DELETE.HR_WORK", {"seq": 1, "no_erase": True})
    with pytest.raises(NotTheirs, match="not one of its pool"):
        await make(api, "STREAM.MSG.DELETE.HR_WORK", {"seq": 2, "no_erase": True})
    assert api.changed == ["STREAM.MSG.DELETE.HR_WORK"]


async def test_consumers_of_the_pool_are_deleted_and_those_that_read_more_are_not() -> None:
    api = FakeApi()
    await make(api, "CONSUMER.DELETE.HR_WORK.W_w1")
    for name in ("W_w2", "both", "all"):
        with pytest.raises(NotTheirs, match="not one of its pool"):
            await make(api, f"CONSUMER.DELETE.HR_WORK.{name}")
    assert api.changed == ["CONSUMER.DELETE.HR_WORK.W_w1"]


async def test_a_list_has_the_consumers_of_the_pool_only_in_pages() -> None:
    api = FakeApi()
    listed = await make(api, "CONSUMER.LIST.HR_WORK", {"offset": 0})
    assert ([one["name"] for one in listed["consumers"]], listed["total"]) == (["W_w1"], 1)
    api.consumers |= {f"own-{n}": {"filter_subject": "hr.work.a.x"} for n in range(2 * PAGE)}
    found: list[str] = []
    while page := (await make(api, "CONSUMER.LIST.HR_WORK", {"offset": len(found)}))["consumers"]:
        found += [one["name"] for one in page]
    assert found == ["W_w1", *(f"own-{n}" for n in range(2 * PAGE))]


@pytest.mark.parametrize(
    ("call", "body"),
    [
        ("STREAM.MSG.GET.HR_REQ", {"seq": 1}),
        ("STREAM.MSG.GET.*", {"seq": 1}),
        ("STREAM.PURGE.HR_WORK", {}),
        ("STREAM.MSG.GET.HR_WORK", {"last_by_subj": "hr.work.b.w2"}),
        ("STREAM.MSG.GET.HR_WORK", {"seq": "1"}),
        ("STREAM.MSG.GET.HR_WORK", None),
        ("STREAM.MSG.GET.HR_WORK", {"seq": 1, "deliver": "x"}),
        ("STREAM.MSG.DELETE.HR_WORK", {"next_by_subj": "hr.work.a.w1"}),
        ("CONSUMER.LIST.HR_WORK", {"offset": -1}),
        ("CONSUMER.LIST.HR_WORK", {"offset": "0"}),
        ("CONSUMER.DELETE.HR_WORK.*", None),
        ("CONSUMER.DELETE.HR_WORK.>", None),
        ("CONSUMER.DELETE.HR_WORK.W_w1\r\nPUB x 0\r\n", None),  # would be a command of the steward's connection
        ("CONSUMER.DELETE.HR_WORK.W_w1 ", None),
        ("CONSUMER.INFO.HR_WORK.W_w2", None),
        ("", None),
    ],
)
async def test_what_is_no_such_call_is_not_made(call: str, body: Any) -> None:
    api = FakeApi()
    with pytest.raises(NotTheirs):
        await make(api, call, body)
    assert not api.changed


@pytest.mark.parametrize("role", ["ingress", "console", "planner"])
async def test_other_roles_have_no_calls_made(role: Any) -> None:
    with pytest.raises(NotTheirs, match="no such call"):
        await make(FakeApi(), "STREAM.MSG.GET.HR_WORK", {"seq": 1}, permissions(Topology(Subjects("hr")), Login(role)))


async def test_a_stream_is_described_with_the_subjects_that_the_login_may_know() -> None:
    api = FakeApi()
    assert (await make(api, "STREAM.INFO.HR_RESULT"))["asked"] is None
    query = {"subjects_filter": "hr.req.a.>", "offset": 0}
    assert (await make(api, "STREAM.INFO.HR_REQ", query, ROUTER))["asked"] == query


@pytest.mark.parametrize(
    "query",
    [
        {"subjects_filter": ">"},
        {"subjects_filter": "hr.>"},
        {"subjects_filter": "hr.req.>"},
        {"subjects_filter": "hr.req.*.>"},
        {"subjects_filter": "hr.req.b.>"},
        {"subjects_filter": "hr.req.*.std.*"},
        {"subjects_filter": "hr.result.acme.*"},
        {"subjects_filter": 1},
        {"deleted_details": True},
        [],
        "hr.req.a.>",
    ],
)
async def test_subjects_with_names_of_others_are_not_listed(query: Any) -> None:
    with pytest.raises(NotTheirs):
        await make(FakeApi(), "STREAM.INFO.HR_REQ", query, ROUTER)
