"""Logins: their names, inboxes and scopes."""

from __future__ import annotations

import pytest

from headrace.jetstream.errors import SubjectError
from headrace.jetstream.logins.roles import Login, inboxes
from tests.support.subject_patterns import matches


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
