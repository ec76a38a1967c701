"""Tokens of an identity provider: whose signature, for whom, until when."""

from __future__ import annotations

import base64
import hmac
import json
import time
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from headrace.frontend.auth import key_ring
from headrace.frontend.auth.key_ring import BearerTokens
from headrace.frontend.errors import SigningKeysUnusable
from headrace.frontend.settings import FrontendSettings
from tests.support.frontend.keyed import Keyed

ISSUER, AUDIENCE = "https://id.example", "headrace"
RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC_KEY = ec.generate_private_key(ec.SECP256R1())
OTHER = rsa.generate_private_key(public_exponent=65537, key_size=2048)


def jwks() -> dict[str, Any]:
    one = RSAAlgorithm.to_jwk(RSA_KEY.public_key(), as_dict=True) | {"kid": "r1", "alg": "RS256", "use": "sig"}
    two = ECAlgorithm.to_jwk(EC_KEY.public_key(), as_dict=True) | {"kid": "e1", "alg": "ES256", "use": "sig"}
    return {"keys": [one, two, {"kty": "oct", "k": base64.urlsafe_b64encode(b"shared" * 8).decode(), "kid": "o1"}]}


def settings(folder: Path, **more: Any) -> FrontendSettings:
    (folder / "jwks.json").write_text(json.dumps(jwks()))
    return FrontendSettings(
        jwt_keys=str(folder / "jwks.json"), jwt_issuer=ISSUER, jwt_audience=AUDIENCE, jwt_tenant_claim="org", **more
    )


def token(key: Any = RSA_KEY, *, kid: str | None = "r1", algorithm: str = "RS256", **claims: Any) -> str:
    values = {"iss": ISSUER, "aud": AUDIENCE, "sub": "user", "org": "acme", "exp": time.time() + 60, **claims}
    values = {name: value for name, value in values.items() if value is not None}
    return jwt.encode(values, key, algorithm=algorithm, headers={"kid": kid} if kid else None)


async def loaded(folder: Path, **more: Any) -> BearerTokens:
    tokens = BearerTokens(settings(folder), **more)
    await tokens.load()
    return tokens


async def test_a_valid_token_stands_for_the_tenant_of_its_claim(tmp_path: Path) -> None:
    tokens = await loaded(tmp_path)
    for text in (token(), token(EC_KEY, kid="e1", algorithm="ES256")):
        caller = tokens.find(text.encode())
        assert caller is not None
        assert caller.tenant == "acme"
        assert caller is tokens.find(text.encode())
        assert {"generate", "stored"} <= caller.scopes
        assert not {"admin", "act_as", "metrics"} & caller.scopes


@pytest.mark.parametrize(
    "changes",
    [
        {"key": OTHER},
        {"iss": "https://evil.example"},
        {"aud": "another-service"},
        {"exp": time.time() - 3600},
        {"exp": None},
        {"aud": None},
        {"sub": None},
        {"org": None},
        {"org": 7},
        {"nbf": time.time() + 3600},
        {"kid": "unknown"},
        {"kid": None},
        {"key": b"shared" * 8, "algorithm": "HS256", "kid": "o1"},
    ],
    ids=lambda changes: "-".join(f"{name}_{'none' if value is None else 'other'}" for name, value in changes.items()),
)
async def test_a_token_that_is_wrong_in_one_point_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert (await loaded(tmp_path)).find(token(**changes).encode()) is None


async def test_a_token_without_signature_and_one_signed_with_the_public_key_are_refused(tmp_path: Path) -> None:
    tokens = await loaded(tmp_path)
    claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "u", "org": "acme", "exp": time.time() + 60}
    assert tokens.find(jwt.encode(claims, None, algorithm="none", headers={"kid": "r1"}).encode()) is None
    public = RSA_KEY.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    parts = [
        base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in ({"alg": "HS256", "kid": "r1"}, claims)
    ]
    mac = hmac.digest(public, b".".join(parts), "sha256")
    assert tokens.find(b".".join([*parts, base64.urlsafe_b64encode(mac).rstrip(b"=")])) is None
    for rubbish in (b"..", b"a.b.c", b"." * 3, b"x" * 20_000 + b"..", b"\xff.\xff.\xff"):
        assert tokens.find(rubbish) is None


async def test_a_token_ends_with_its_time_though_it_is_remembered(tmp_path: Path) -> None:
    now = [time.time()]
    tokens = await loaded(tmp_path, wall=lambda: now[0])
    text = token().encode()
    assert tokens.find(text) is not None
    now[0] += 61 + key_ring.LEEWAY_S
    assert tokens.find(text) is None


async def test_a_withdrawn_key_signs_nothing_after_the_next_reading(tmp_path: Path) -> None:
    tokens = await loaded(tmp_path)
    text = token().encode()
    assert tokens.find(text) is not None
    (tmp_path / "jwks.json").write_text(json.dumps({"keys": jwks()["keys"][1:]}))
    await tokens.load()
    assert tokens.find(text) is None


async def test_keys_that_cannot_be_used_are_refused_by_name(tmp_path: Path) -> None:
    wishes = settings(tmp_path)
    for content in ("{", "[]", '{"keys": []}'):
        (tmp_path / "jwks.json").write_text(content)
        with pytest.raises(SigningKeysUnusable, match=r"jwks\.json"):
            await BearerTokens(wishes).load()
    with pytest.raises(SigningKeysUnusable, match="https:"):
        BearerTokens(FrontendSettings(jwt_keys="http://id.example/jwks", jwt_issuer=ISSUER, jwt_audience=AUDIENCE))
    with pytest.raises(ValueError, match="jwt_audience"):
        FrontendSettings(jwt_keys="x", jwt_issuer=ISSUER)


async def test_requests_with_tokens_run_for_their_tenant(tmp_path: Path) -> None:
    (tmp_path / "jwks.json").write_text(json.dumps(jwks()))
    bed = Keyed(jwt_keys=str(tmp_path / "jwks.json"), jwt_issuer=ISSUER, jwt_audience=AUDIENCE, jwt_tenant_claim="org")
    assert bed.ring.tokens is not None
    await bed.ring.tokens.load()
    assert (await bed.ask(token())).status == 200
    assert (await bed.ask(token(OTHER))).status == 401
    assert (await bed.ask(token(), x_headrace_tenant="victim")).status == 403
    assert [job.tenant for job in bed.ingress.jobs] == ["acme"]
