"""OpenAI's own example of a batch, by the `openai` client against the real model: upload, create, poll, download."""

from __future__ import annotations

import json
import time
from pathlib import Path

import openai
import pytest

from tests.engines.served.conftest import MODEL

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

SYSTEM = "You are a helpful assistant."
LINES = (
    {"custom_id": "request-1", "content": "What is the capital of France?"},
    {"custom_id": "request-2", "content": "Name three colours."},
)
ENDED_S = 120.0


def body(content: str) -> dict[str, object]:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]
    return {"model": MODEL, "messages": messages, "max_tokens": 24, "temperature": 0}


def test_the_example_of_a_batch_gives_the_answers_that_chats_get(ours: str, tmp_path: Path) -> None:
    file = tmp_path / "batchinput.jsonl"
    requests = [
        {"custom_id": line["custom_id"], "method": "POST", "url": "/v1/chat/completions", "body": body(line["content"])}
        for line in LINES
    ]
    file.write_text("".join(json.dumps(request) + "\n" for request in requests))
    with openai.OpenAI(base_url=f"{ours}/v1", api_key="none", max_retries=0, timeout=120) as client:
        with file.open("rb") as data:
            batch_input_file = client.files.create(file=data, purpose="batch")
        batch = client.batches.create(
            input_file_id=batch_input_file.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            metadata={"description": "nightly eval job"},
        )
        end = time.monotonic() + ENDED_S
        while (batch := client.batches.retrieve(batch.id)).status not in ("completed", "failed", "expired", "cancelled"):
            assert time.monotonic() < end, batch
            time.sleep(0.2)
        assert (batch.status, batch.error_file_id) == ("completed", None)
        assert batch.request_counts is not None
        assert batch.request_counts.model_dump() == {"total": 2, "completed": 2, "failed": 0}
        assert batch.metadata == {"description": "nightly eval job"}
        assert batch.output_file_id is not None
        output = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
        assert sorted(line["custom_id"] for line in output) == ["request-1", "request-2"]
        answers = {line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"] for line in output}
        assert "Paris" in answers["request-1"]
        for line in LINES:
            chat = client.chat.completions.create(**body(line["content"]))  # type: ignore[call-overload]
            assert answers[line["custom_id"]] == chat.choices[0].message.content
