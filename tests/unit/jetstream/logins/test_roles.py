"""Logins: their names, inboxes and scopes."""

from __future__ import annotations

import inspect
from typing import Any, cast

import pytest

from headrace.jetstream.api import MESSAGE_NOT_FOUND, ApiError, ApiFault, JsApi
from headrace.jetstream.errors import SubjectError
from headrace.jetstream.logins.roles import (
    PAGE,
    PARTS_API,
    ROLES,
    Login,
    NotTheirs,
    Permissions,
    PoolCalls,
    inboxes,
    permissions,
)
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology
from tests.support.subject_patterns import allowed, api_calls, core_subjects, inboxes_of_all, matches, overlap, stored_subjects


def test_a_login_of_a_pool_has_a_name_and_an_inbox_of_its_own() -> None:
    login = Login("worker", "sim-0a1b2c3d")
    assert (login.name, login.inbox, login.pool) == ("worker-sim-0a1b2c3d", "_INBOX.worker.sim-0a1b2c3d", "sim-0a1b2c3d")
    assert (Login("router").name, Login("router").pool) == ("router", "*")


def test_the_tenant_of_a_batch_login_is_no_pool() -> None:
    assert Login("batch", "acme").pool == "*"


def test_the_inboxes_of_a_role_are_those_of_its_logins() -> None:
    assert matches(inboxes("worker"), f"{Login('worker', 'p').inbox}.nuid.a.1")
    assert matches(inboxes("worker", "p"), f"{Login('worker', 'p').inbox}.nuid.a.1")
    assert not matches(inboxes("worker", "q"), f"{Login('worker', 'p').inbox}.nuid.a.1")
    assert not matches(inboxes("router"), f"{Login('worker', 'p').inbox}.nuid.a.1")


@pytest.mark.parametrize(
    ("role", "scope", "says"),
    [
        ("emperor", "", "role 'emperor' is not one of operator"),
        ("batch", "", "needs a tenant"),
        ("ingress", "p", "neither pools nor tenants, got 'p'"),
        ("worker", "a.b", "cannot be part of a subject"),
        ("worker", "*", "cannot be part of a subject"),
    ],
)
def test_a_login_that_makes_no_sense_is_refused_by_name(role: str, scope: str, says: str) -> None:
    with pytest.raises(SubjectError, match=says.replace("*", r"\*")):
        Login(role, scope)  # type: ignore[arg-type]


TOPOLOGY = Topology(Subjects("hr"))
OWN, OTHER = "pool-a", "pool-b"
LOGINS = [Login(role, "acme" if role == "batch" else OWN if role in ("worker", "router") else "") for role in ROLES]
NOT_OPERATOR = [login for login in LOGINS if login.role != "operator"]

OPERATORS_ONLY = {"KV_hr_keys", "OBJ_hr_adapters"}  # that no part writes

by_login = pytest.mark.parametrize("login", NOT_OPERATOR, ids=lambda login: login.name)


def published(login: Login) -> tuple[str, ...]:
    return permissions(TOPOLOGY, login).publish


def heard(login: Login) -> tuple[str, ...]:
    return permissions(TOPOLOGY, login).subscribe


@by_login
def test_only_an_operator_changes_or_copies_streams(login: Login) -> None:
    refused = ("STREAM.CREATE", "STREAM.UPDATE", "STREAM.DELETE", "STREAM.SNAPSHOT", "STREAM.RESTORE", "ACCOUNT.PURGE")
    for call in api_calls(TOPOLOGY):
        if any(f".{name}." in call for name in refused):
            assert not allowed(published(login), call), call


@by_login
def test_only_an_operator_reads_audit_records_and_only_frontends_write_them(login: Login) -> None:
    for call in api_calls(TOPOLOGY):
        if "HR_AUDIT" in call and not any(word in call for word in ("INFO", "CONSUMER.LIST")):
            assert not allowed(published(login), call), call
    assert not [one for one in permissions(TOPOLOGY, login).consumers if "AUDIT" in one]
    assert not allowed(heard(login), "hr.audit.acme")
    assert allowed(published(login), "hr.audit.acme") == (login.role == "ingress")


@by_login
def test_no_login_reaches_another_deployment_or_the_system(login: Login) -> None:
    other = Topology(Subjects("zz"))
    subjects = [
        *core_subjects(other, OWN, "acme"),
        *stored_subjects(other, OWN),
        "$SYS.REQ.SERVER.PING",
        "$SYS.ACCOUNT.X.CONNECT",
    ]
    for subject in subjects:
        assert not allowed(published(login), subject), subject
        assert not allowed(heard(login), subject), subject
    for call in api_calls(other):
        if "ZZ" in call and not call.startswith(f"{PARTS_API}.CONSUMER.") and login.role != "ingress":
            assert not allowed(published(login), call), call


@pytest.mark.parametrize("role", ["worker", "router"])
def test_a_login_of_a_pool_names_no_other_pool(role: str) -> None:
    login = Login(role, OWN)  # type: ignore[arg-type]
    own, other = core_subjects(TOPOLOGY, OWN, "acme"), core_subjects(TOPOLOGY, OTHER, "acme")
    for mine, foreign in zip(own, other, strict=True):
        if mine != foreign:
            assert not allowed(published(login), foreign), foreign
            assert not allowed(heard(login), foreign), foreign
    for mine, foreign in zip(stored_subjects(TOPOLOGY, OWN), stored_subjects(TOPOLOGY, OTHER), strict=True):
        if mine != foreign:
            assert not allowed(published(login), foreign), foreign


def test_a_worker_of_a_pool_reads_and_writes_the_embeddings_of_that_pool_only() -> None:
    lists = permissions(TOPOLOGY, Login("worker", OWN))
    every = permissions(TOPOLOGY, Login("worker"))
    for pool in (OWN, OTHER):
        for store in TOPOLOGY.pool_stores(pool):
            stream = store.stream().name
            mine = pool == OWN
            calls = [f"{PARTS_API}.{call}.{stream}" for call in ("DIRECT.GET", "STREAM.MSG.GET", "STREAM.PURGE")]
            for subject in (*calls, f"$O.{store.name}.C.abc", f"$O.{store.name}.M.abc"):
                assert allowed(lists.publish, subject) == mine, subject
                assert not allowed(every.publish, subject), subject
            assert allowed(lists.asked, f"STREAM.CREATE.{stream}") == mine


@pytest.mark.parametrize("login", [one for one in NOT_OPERATOR if one.role != "ingress"], ids=lambda one: one.name)
def test_only_an_ingress_asks_the_server_itself_for_subjects_with_tenants(login: Login) -> None:
    """Those of placed work have none: they are of pools and workers."""
    for call in api_calls(TOPOLOGY):
        if ".STREAM.INFO." in call and not (login.role in ("router", "worker") and call.endswith(".HR_WORK")):
            assert not allowed(published(login), call), call


def test_what_a_login_may_have_counted_names_its_own_pool_or_queues_only() -> None:
    assert permissions(TOPOLOGY, Login("worker", OWN)).counted == ()
    assert permissions(TOPOLOGY, Login("router", OWN)).counted == (f"hr.req.{OWN}.>",)
    assert permissions(TOPOLOGY, Login("console")).counted == ("hr.job.>", "hr.req.>", "hr.work.>")
    assert permissions(TOPOLOGY, Login("batch", "acme")).counted == ()


def test_a_worker_of_a_pool_takes_no_work_of_another_one() -> None:
    login = Login("worker", OWN)
    for consumer, stream, pattern in (
        ("W_w9", "HR_WORK", f"hr.work.{OTHER}.w9"),
        (f"REQ_{OTHER}_std", "HR_REQ", f"hr.req.{OTHER}.std.*"),
        (f"P_{OTHER}", "HR_PREFILL", f"hr.prefill.{OTHER}"),
    ):
        wanted = permissions(TOPOLOGY, login).consumers
        assert not allowed(wanted, f"CONSUMER.CREATE.{stream}.{consumer}.{pattern}")
        assert allowed(wanted, f"CONSUMER.CREATE.{stream}.{consumer}.{pattern}".replace(OTHER, OWN))
    assert not allowed(published(login), f"{PARTS_API}.CONSUMER.MSG.NEXT.HR_REQ.REQ_{OTHER}_std")
    assert allowed(published(login), f"{PARTS_API}.CONSUMER.MSG.NEXT.HR_REQ.REQ_{OWN}_std")


@by_login
def test_no_part_makes_a_consumer_or_speaks_to_another_api(login: Login) -> None:
    """Who makes a consumer says where its messages go."""
    for call in (*api_calls(TOPOLOGY), *api_calls(TOPOLOGY, "$JS.API")):
        if ".CREATE." in call or call.startswith("$JS.API."):
            assert not allowed(published(login), call), call


@by_login
def test_a_login_asks_the_steward_under_its_own_name_only(login: Login) -> None:
    asked = [one.steward("hr") for one in LOGINS if allowed(published(login), one.steward("hr"))]
    assert asked == ([login.steward("hr")] if permissions(TOPOLOGY, login).consumers else [])


@by_login
def test_only_an_ingress_hears_answers_and_only_a_worker_gives_them(login: Login) -> None:
    for subjects in (TOPOLOGY.subjects, TOPOLOGY.subjects.spoken_by(OWN, "w1")):
        assert allowed(heard(login), subjects.out("i1")) == (login.role == "ingress")
        assert allowed(heard(login), subjects.judge("i1")) == (login.role == "ingress")
    assert allowed(published(login), TOPOLOGY.subjects.spoken_by(OWN, "w1").out("i1")) == (login.role == "worker")
    assert not allowed(published(login), TOPOLOGY.subjects.out("i1"))


@by_login
def test_no_worker_commands_a_worker(login: Login) -> None:
    subject = TOPOLOGY.subjects.operate_worker(OWN, "w1")
    assert allowed(published(login), subject) == (login.role in ("ingress", "router", "planner"))
    assert allowed(heard(login), subject) == (login.role == "worker")


@by_login
def test_only_an_operator_writes_keys_and_only_an_ingress_reads_them(login: Login) -> None:
    assert not allowed(published(login), "$KV.hr_keys.k1")
    assert allowed(published(login), f"{PARTS_API}.STREAM.MSG.GET.KV_hr_keys") == (login.role == "ingress")
    watch = "CONSUMER.CREATE.KV_hr_keys.w.$KV.hr_keys.>"
    assert allowed(permissions(TOPOLOGY, login).consumers, watch) == (login.role == "ingress")


@by_login
def test_dead_letters_are_written_by_those_who_bury_and_read_by_operators_only(login: Login) -> None:
    assert not allowed(published(login), f"{PARTS_API}.STREAM.MSG.GET.HR_DLQ")
    assert not allowed(published(login), f"{PARTS_API}.DIRECT.GET.HR_DLQ")
    assert allowed(published(login), TOPOLOGY.subjects.dlq(OWN)) == (login.role in ("ingress", "router", "worker"))


def test_a_console_reads_no_prompt_and_writes_nothing() -> None:
    login = Login("console")
    for subject in (*core_subjects(TOPOLOGY, OWN, "acme"), *stored_subjects(TOPOLOGY, OWN), *inboxes_of_all()):
        assert not allowed(published(login), subject), subject
    for call in api_calls(TOPOLOGY):
        reads = "MSG.GET" in call or "DIRECT.GET" in call or "MSG.NEXT" in call
        if reads and not any(shown in call for shown in ("KV_hr_members", "KV_hr_models", "HR_LOAD")):
            assert not allowed(published(login), call), call
    readable = [subject for subject in core_subjects(TOPOLOGY, OWN, "acme") if allowed(heard(login), subject)]
    assert readable == ["hr.load.pool-a.w1", "hr.ev.pool-a"]


def test_a_batch_tenant_has_its_own_jobs_and_results_only() -> None:
    login = Login("batch", "acme")
    assert [s for s in core_subjects(TOPOLOGY, OWN, "acme") if allowed(published(login), s)] == ["hr.job.m.acme"]
    assert [s for s in core_subjects(TOPOLOGY, OWN, "acme") if allowed(heard(login), s)] == ["hr.jobev.acme.j1"]
    for subject in core_subjects(TOPOLOGY, OWN, "rival"):
        assert not allowed((*published(login), *heard(login)), subject), subject
    calls = [call for call in api_calls(TOPOLOGY) if allowed(published(login), call)]
    assert calls == [f"{PARTS_API}.INFO"]
    assert allowed(published(login), f"{PARTS_API}.DIRECT.GET.HR_RESULT.hr.result.acme.j1")
    assert not allowed(published(login), f"{PARTS_API}.DIRECT.GET.HR_RESULT.hr.result.rival.j1")


@by_login
def test_replies_arrive_at_an_inbox_that_no_other_role_hears(login: Login) -> None:
    mine = [inbox for inbox in inboxes_of_all() if allowed(heard(login), inbox)]
    assert mine == [f"{login.inbox}.x.a.1"]


def test_every_stream_is_written_by_a_part_and_none_by_nobody() -> None:
    """A stream that is added to the topology needs rules, or the parts that use it stop working with logins."""
    for spec in TOPOLOGY.all_streams():
        writers = {
            login.role
            for login in NOT_OPERATOR
            if any(overlap(pattern, subject) for pattern in published(login) for subject in spec.subjects)
        }
        assert bool(writers) == (spec.name not in OPERATORS_ONLY), (spec.name, writers)


def test_a_subject_of_every_kind_is_tried() -> None:
    """One that is added to the subjects of a deployment must be tried by each role, too."""
    names = TOPOLOGY.subjects
    some = {"request_class": "std", "window": 1, "kind": "tokens", "to_ingress": "hr.out.i1"}
    tried = {(one.split(".")[1], one.count(".")) for one in core_subjects(TOPOLOGY, OWN, "acme")}
    missing = set()
    for name, method in inspect.getmembers(names, inspect.ismethod):
        signature = inspect.signature(method, eval_str=True)
        if name.startswith("_") or signature.return_annotation is not str:
            continue
        made = method(*(some.get(one, "x1") for one in signature.parameters))
        if made.startswith("hr.") and not {"*", ">"} & set(made.split(".")):
            missing |= {name} if (made.split(".")[1], made.count(".")) not in tried else set()
    assert missing == set()
    assert len(tried) > 20


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
