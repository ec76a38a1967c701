"""The allow-lists of roles: what each may and may not do, by the names of the topology."""

from __future__ import annotations

import inspect

import pytest

from headrace.jetstream.logins.permissions import PARTS_API, permissions
from headrace.jetstream.logins.roles import ROLES, Login
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology
from tests.support.subject_patterns import allowed, api_calls, core_subjects, inboxes_of_all, overlap, stored_subjects

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
