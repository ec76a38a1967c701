"""Records have the figures of a request; its words only where they are wanted, cut, and without what is redacted."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from headrace.broker.codec import decode, encode
from headrace.broker.messages import AuditRecord, Part, Row
from headrace.broker.messages.audit_records import MOST_CONTENT
from headrace.frontend.errors import AuditUnusable
from headrace.frontend.request_audit.policy import MOST_KEPT, REDACTED, AuditPolicy, Content, Ended, read_patterns
from headrace.frontend.settings import AUDIT_LEAVABLE, FrontendSettings

FIELDS = {
    "model": "m",
    "class": "std",
    "prompt_tokens": 5,
    "completion_tokens": 2,
    "ttft_s": 0.5,
    "workers": ["w"],
    "attempts": 1,
}


def ended(content: Content | None = None) -> Ended:
    return Ended(
        at=1.0,
        id="r",
        route="/v1/chat/completions",
        tenant="acme",
        status=200,
        took_s=2.0,
        key="k",
        fields=FIELDS,
        content=content,
    )


def words(body: bytes = b"call 555-0100", answer: str = "it is 555-0199") -> Content:
    content = Content()
    content.asked(body)
    content.answered([Row("r", 1, 1, 0, 0, [1], [answer])])
    return content


def record(said: Content | None = None, **policy: object) -> AuditRecord:
    settings = {"content": True, **policy}
    made = AuditPolicy("i", **settings).record(ended(said))  # type: ignore[arg-type]
    assert decode(AuditRecord, encode(made)) == made
    return made


def test_a_record_has_the_figures_of_its_request() -> None:
    made = record()
    assert (made.tenant, made.key, made.model, made.status) == ("acme", "k", "m", 200)
    assert (made.prompt_tokens, made.completion_tokens, made.ttft_s, made.took_s) == (5, 2, 0.5, 2.0)
    assert (made.workers, made.request, made.answer) == (["w"], "", "")


def test_words_are_kept_only_where_they_are_wanted() -> None:
    kept = record(words())
    assert (kept.request, kept.answer) == ("call 555-0100", "it is 555-0199")
    not_kept = record(words(), content=False)
    assert (not_kept.request, not_kept.answer) == ("", "")


def test_what_a_pattern_matches_is_redacted_everywhere() -> None:
    made = record(words(), patterns=[re.compile(r"\d{3}-\d{4}")])
    assert (made.request, made.answer) == (f"call {REDACTED}", f"it is {REDACTED}")


def test_what_is_redacted_at_the_cut_is_redacted_whole() -> None:
    secret = "555-0100"
    body = "x" * (MOST_CONTENT - 4) + secret
    made = record(words(body.encode()), patterns=[re.compile(r"\d{3}-\d{4}")])
    assert "555" not in made.request
    assert made.cut


def test_long_words_are_cut_and_say_so() -> None:
    made = record(words(b"x" * (MOST_KEPT + 1), "y" * (MOST_KEPT + 1)))
    assert (len(made.request), len(made.answer), made.cut) == (MOST_CONTENT, MOST_CONTENT, True)
    assert not record(words()).cut


@pytest.mark.parametrize("name", AUDIT_LEAVABLE)
def test_a_field_that_is_left_out_is_in_no_record(name: str) -> None:
    default = msgspec.structs.asdict(AuditRecord(at=0, id="", frontend="i", route="", tenant="t"))[name]
    assert getattr(record(words(), left_out=[name]), name) == default


def test_a_field_that_cannot_be_left_out_is_refused() -> None:
    with pytest.raises(ValueError, match="audit_leave_out: 'tenant'"):
        FrontendSettings(audit_leave_out=["tenant"])


def test_choices_are_kept_apart() -> None:
    content = Content()
    content.answered([Row("r", 1, 1, 1, 0, [1], ["b"]), Row("r", 1, 1, 0, 0, [1], ["a"]), Row("r", 1, 1, 1, 1, [1], ["b"])])
    assert content.answer == "a\nbb"


def test_reasoning_and_calls_of_tools_are_words_of_the_answer() -> None:
    content = Content()
    parts = [Part("reasoning", "hm. "), Part("content", "I look."), Part("tool", '{"q"', 0, "c1", "look"), Part("tool", ":1}")]
    content.answered([Row("r", 1, 1, 0, 0, [1, 2], [parts[:2], parts[2:]])])
    assert content.answer == 'hm. I look.\nlook {"q":1}'


def test_patterns_are_read_from_lines_and_a_wrong_one_is_named(tmp_path: Path) -> None:
    file = tmp_path / "patterns"
    file.write_text("# telephone\n\\d{3}-\\d{4}\n\n")
    assert [one.pattern for one in read_patterns(str(file))] == [r"\d{3}-\d{4}"]
    assert read_patterns(None) == []
    file.write_text("fine\n(\n")
    with pytest.raises(AuditUnusable, match="line 2"):
        read_patterns(str(file))
    with pytest.raises(AuditUnusable, match="cannot be read"):
        read_patterns(str(tmp_path / "none"))
