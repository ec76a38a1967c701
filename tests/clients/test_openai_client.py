"""`openai`: a model whose name has a slash, on every route that the client has for it."""

from __future__ import annotations

from conftest import CHAT, EMBED
from openai import OpenAI

HI = [{"role": "user", "content": "Say hello."}]


def test_a_model_with_a_slash_in_its_name(url: str) -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [CHAT]
        assert client.models.retrieve(CHAT).id == CHAT
        assert client.chat.completions.create(model=CHAT, messages=HI, max_tokens=8).choices[0].message
        stream = client.chat.completions.create(model=CHAT, messages=HI, max_tokens=8, stream=True)
        assert list(stream)[-1].choices[0].finish_reason == "length"
        assert client.responses.create(model=CHAT, input="hi", max_output_tokens=16).status == "incomplete"
        assert client.completions.create(model=CHAT, prompt="hi", max_tokens=8).choices[0].text


def test_vectors(embed_url: str) -> None:
    with OpenAI(base_url=f"{embed_url}/v1", api_key="none", max_retries=0) as client:
        assert len(client.embeddings.create(model=EMBED, input=["a", "b"]).data) == 2
