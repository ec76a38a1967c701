"""The client of the Kubernetes API against a fake of it over real TLS. There is no cluster here."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.planner.kubernetes.api import KubernetesApi
from headrace.planner.kubernetes.errors import (
    AccessDenied,
    AnswerUnreadable,
    ApiRefused,
    ApiUnreachable,
    ChangedMeanwhile,
    KubernetesError,
    ObjectMissing,
    OutcomeUnknown,
)
from tests.support.kubernetes_api import FakeCluster, served

LIST = "/apis/apps/v1/namespaces/llm/deployments?labelSelector=plan.headrace/role%3Ddecode"
SCALE = "/apis/apps/v1/namespaces/llm/deployments/d/scale"


@pytest.fixture
def cluster() -> FakeCluster:
    found = FakeCluster()
    found.deployment("d", pool="p", role="decode", replicas=2)
    return found


@pytest.fixture
def port(cluster: FakeCluster, tmp_path: Path) -> Iterator[int]:
    with served(cluster, tmp_path) as found:
        yield found


async def test_it_reads_and_changes_as_the_service_account(cluster: FakeCluster, port: int, tmp_path: Path) -> None:
    api = KubernetesApi("127.0.0.1", port, account=tmp_path)
    assert api.namespace == "llm"
    assert [one["metadata"]["name"] for one in (await api.get(LIST))["items"]] == ["d"]
    await api.patch(SCALE, {"metadata": {"resourceVersion": "7"}, "spec": {"replicas": 5}})
    assert cluster.replicas == {"d": 5}


async def test_a_token_that_was_replaced_is_read_again(cluster: FakeCluster, port: int, tmp_path: Path) -> None:
    api = KubernetesApi("127.0.0.1", port, account=tmp_path)
    cluster.token = "token-2"
    with pytest.raises(AccessDenied):
        await api.get(LIST)
    (tmp_path / "token").write_text("token-2")
    await api.get(LIST)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, AccessDenied),
        (403, AccessDenied),
        (404, ObjectMissing),
        (409, ChangedMeanwhile),
        (422, ApiRefused),
        (429, ApiRefused),
    ],
)
async def test_a_refusal_says_what_kind_it_is_and_why(
    cluster: FakeCluster, port: int, tmp_path: Path, status: int, kind: type[ApiRefused]
) -> None:
    cluster.refuse = lambda _verb, _path: (status, {"kind": "Status", "message": "because"})
    with pytest.raises(ApiRefused, match="because") as found:
        await KubernetesApi("127.0.0.1", port, account=tmp_path).get(LIST)
    assert type(found.value) is kind
    assert found.value.status == status


async def test_a_server_that_another_authority_vouches_for_gets_no_token(
    cluster: FakeCluster, port: int, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with served(FakeCluster(), other):
        pass
    with pytest.raises(ApiUnreachable, match="certificate"):
        await KubernetesApi("127.0.0.1", port, account=other).get(LIST)
    assert cluster.asked == []


@pytest.mark.parametrize("verb", ["GET", "PATCH"])
async def test_an_answer_that_does_not_come_leaves_the_outcome_of_a_change_unknown(
    cluster: FakeCluster, port: int, tmp_path: Path, verb: str
) -> None:
    release = threading.Event()
    cluster.before_answer = lambda _verb, _path: (release.wait(30), None)[1]
    api = KubernetesApi("127.0.0.1", port, account=tmp_path, timeout_s=0.3)
    change = {"metadata": {"resourceVersion": "7"}, "spec": {"replicas": 5}}
    asked = api.get(SCALE) if verb == "GET" else api.patch(SCALE, change)
    try:
        with pytest.raises(KubernetesError) as found:
            await asked
    finally:
        release.set()
    assert type(found.value) is (ApiUnreachable if verb == "GET" else OutcomeUnknown)
    assert cluster.replicas == {"d": 2 if verb == "GET" else 5}, "it was made, and nobody was told"


async def test_where_nothing_listens_nothing_was_changed(port: int, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        api = KubernetesApi("127.0.0.1", free.getsockname()[1], account=tmp_path)
        with pytest.raises(ApiUnreachable):
            await api.patch(SCALE, {})


@pytest.mark.parametrize("raw", [b"<html>", b"[1]", b"\xff"])
async def test_an_answer_that_is_no_object_is_an_error(cluster: FakeCluster, port: int, tmp_path: Path, raw: bytes) -> None:
    cluster.raw = raw
    with pytest.raises(AnswerUnreadable):
        await KubernetesApi("127.0.0.1", port, account=tmp_path).get(LIST)


def test_outside_of_a_cluster_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(ApiUnreachable, match="KUBERNETES_SERVICE_HOST"):
        KubernetesApi.of_this_pod({})
    with pytest.raises(ApiUnreachable, match="service account"):
        KubernetesApi.of_this_pod({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, tmp_path / "none")
