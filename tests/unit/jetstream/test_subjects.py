import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.jetstream.errors import SubjectError
from headrace.jetstream.subjects import REQUEST_CLASSES, Subjects, check_token, pool_id, slug, tenant_token
from headrace.jetstream.watch import check_key, check_pattern

anything = st.text(max_size=120)
SUBJECTS = Subjects("hr")


def is_token(value: str) -> bool:
    return 0 < len(value) <= 64 and not set(value) & set(".*> \t\r\n") and value.isascii()


@given(anything.filter(bool), anything)
def test_no_model_name_can_bring_a_dot_or_wildcard_into_a_subject(model: str, namespace: str) -> None:
    pool = pool_id(model, namespace)
    assert is_token(pool)
    assert len(SUBJECTS.work_filter(pool).split(".")) == 4


@given(anything)
def test_no_tenant_name_can_bring_a_dot_or_wildcard_into_a_subject(tenant: str) -> None:
    token = tenant_token(tenant)
    assert is_token(token)
    subject = SUBJECTS.req("p", "std", token)
    assert SUBJECTS.parse_req(subject).tenant == token


@given(anything)
def test_every_builder_refuses_what_is_no_token(value: str) -> None:
    if is_token(value) and all(c.isalnum() or c in "_-" for c in value):
        assert check_token(value, "x") == value
        return
    for build in (
        lambda: SUBJECTS.work(value, "w"),
        lambda: SUBJECTS.work("p", value),
        lambda: SUBJECTS.req("p", "hi", value),
        lambda: SUBJECTS.out(value),
        lambda: SUBJECTS.control(value),
        lambda: SUBJECTS.result("t", value),
        lambda: SUBJECTS.rsp(value, "j"),
        lambda: SUBJECTS.job("m", value),
        lambda: SUBJECTS.worker_key("p", value),
        lambda: SUBJECTS.work_consumer(value),
        lambda: Subjects(value),
    ):
        with pytest.raises(SubjectError):
            build()


def test_a_trailing_line_break_is_no_part_of_a_token() -> None:
    with pytest.raises(SubjectError):
        check_token("abc\n", "x")


@given(st.lists(anything.filter(bool), min_size=2, max_size=2, unique=True))
def test_different_models_have_different_pools(models: list[str]) -> None:
    assert pool_id(models[0]) != pool_id(models[1])


def test_names_that_look_alike_have_different_pools_and_tenants() -> None:
    assert pool_id("a/b") != pool_id("a_b")
    assert slug("a/b") == slug("a.b")
    assert tenant_token("a/b") != tenant_token("a.b")
    assert tenant_token("") == "_"


@pytest.mark.parametrize("request_class", REQUEST_CLASSES)
def test_request_subjects_are_read_back(request_class: str) -> None:
    subject = SUBJECTS.req("pool-1", request_class, "t")  # type: ignore[arg-type]
    assert tuple(SUBJECTS.parse_req(subject)) == ("pool-1", request_class, "t")


@pytest.mark.parametrize("bad", ["hr.work.p", "hr.work.p.w.x", "xx.work.p.w", "hr.work.p.*", "hr.work.p.>", "hr.req.p.w"])
def test_foreign_subjects_are_not_read(bad: str) -> None:
    with pytest.raises(SubjectError):
        SUBJECTS.parse_work(bad)


@pytest.mark.parametrize("bad", ["", "a.", ".a", "a..b", "a*", "a b", "a.>", "*", "a\n"])
def test_keys_have_no_wildcards_and_no_empty_parts(bad: str) -> None:
    with pytest.raises(SubjectError):
        check_key(bad)


@pytest.mark.parametrize("bad", ["", "a.>.b", "a*.b", "a..b", "> ", "a.>\n"])
def test_patterns_are_checked(bad: str) -> None:
    with pytest.raises(SubjectError):
        check_pattern(bad)


def test_good_keys_and_patterns_pass() -> None:
    assert check_key("worker.pool-1.w_2") == "worker.pool-1.w_2"
    for pattern in (">", "worker.>", "worker.*.w", "worker.p.w"):
        assert check_pattern(pattern) == pattern


@pytest.mark.parametrize("name", ["acme corp/eu", "a" * 60, "Größe", "x y"])
def test_no_name_is_the_token_of_another_tenant(name: str) -> None:
    token = tenant_token(name)
    assert tenant_token(token) != token
    assert tenant_token(tenant_token(token)) not in (token, tenant_token(token))
    assert len(token) <= 49
