"""Content types of bodies: what a page can send without asking is not taken as JSON."""

from __future__ import annotations

import pytest

from headrace.frontend.auth.body_types import check_body_type
from headrace.frontend.errors import MediaTypeRefused

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("kind", [b"application/json", b"Application/JSON ; charset=latin-1", b"application/vnd.api+json"])
def test_json_is_taken_where_it_is_declared(kind: bytes) -> None:
    check_body_type(CHAT, kind, from_page=False)


@pytest.mark.parametrize(
    "kind", [None, b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data; boundary=x", b"", b"json"]
)
def test_what_a_form_can_send_is_no_json(kind: bytes | None) -> None:
    with pytest.raises(MediaTypeRefused, match="application/json"):
        check_body_type(CHAT, kind, from_page=False)


@pytest.mark.parametrize("path", ["/v1/files", "/v1/uploads/upload_1/parts", "/v1/audio/transcriptions"])
def test_forms_are_taken_where_a_file_comes_in_one(path: str) -> None:
    check_body_type(path, b"multipart/form-data; boundary=x", from_page=False)
    with pytest.raises(MediaTypeRefused, match="multipart/form-data"):
        check_body_type(path, b"application/json", from_page=False)


def test_ollamas_routes_take_what_curl_sends_but_not_what_a_page_sends() -> None:
    for kind in (None, b"application/x-www-form-urlencoded"):
        check_body_type("/api/chat", kind, from_page=False)
        with pytest.raises(MediaTypeRefused):
            check_body_type("/api/chat", kind, from_page=True)
    with pytest.raises(MediaTypeRefused):
        check_body_type("/api/chat", b"text/plain", from_page=False)
