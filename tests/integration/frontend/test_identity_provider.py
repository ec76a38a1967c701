"""Tokens of an identity provider from end to end: the clients of OpenAI and Anthropic with a token in the place of a key."""

from __future__ import annotations

import time
from pathlib import Path

import anthropic
import httpx
import openai
import pytest

from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.subjects import Subjects
from tests.support.local_deployment import serving, sim
from tests.unit.frontend.auth.test_bearer_tokens import AUDIENCE, ISSUER, OTHER, settings, token

MODEL = "oidc-sim"
HI = [{"role": "user", "content": "hi"}]


async def test_a_token_is_taken_like_a_key_and_its_claim_is_the_tenant(
    nats_server: EmbeddedServer, subjects: Subjects, tmp_path: Path
) -> None:
    wishes = settings(tmp_path)
    claims = {"jwt_keys": wishes.jwt_keys, "jwt_issuer": ISSUER, "jwt_audience": AUDIENCE, "jwt_tenant_claim": "org"}
    async with serving(nats_server, subjects, sim(MODEL), api_key=("operator",), **claims) as served:
        url = f"{served.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=token(), max_retries=0) as acme:
            stream = await acme.chat.completions.create(model=MODEL, messages=HI, max_tokens=4, stream=True)  # type: ignore[call-overload]
            assert [chunk async for chunk in stream]
            stored = await acme.responses.create(model=MODEL, input="hi", max_output_tokens=4)
            assert (await acme.responses.retrieve(stored.id)).id == stored.id
        async with anthropic.AsyncAnthropic(base_url=served.url, api_key=token(), max_retries=0) as claude:
            message = await claude.messages.create(model=MODEL, messages=HI, max_tokens=4)  # type: ignore[arg-type]
            assert message.usage.output_tokens == 4
        async with openai.AsyncOpenAI(base_url=url, api_key=token(org="rival"), max_retries=0) as rival:
            with pytest.raises(openai.NotFoundError):
                await rival.responses.retrieve(stored.id)
        for wrong in (token(OTHER), token(aud="another-service"), token(exp=time.time() - 3600), "a.b.c"):
            async with openai.AsyncOpenAI(base_url=url, api_key=wrong, max_retries=0) as stranger:
                with pytest.raises(openai.AuthenticationError) as refused:
                    await stranger.models.list()
                assert refused.value.code == "invalid_api_key"
        async with httpx.AsyncClient(base_url=served.url, headers={"authorization": f"Bearer {token()}"}) as plain:
            assert (await plain.get("/metrics")).status_code == 403
            answer = await plain.get("/v1/models", headers={"x-headrace-tenant": "rival"})
            assert answer.json()["error"]["code"] == "tenant_not_allowed"
