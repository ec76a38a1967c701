"""How a started engine becomes a worker of a pool: its card, its files, its lease value."""

from __future__ import annotations

import secrets
import socket
import time
from os import getpid
from pathlib import Path
from typing import Any

import msgspec

from broker.cards import ModelCard
from broker.messages import WorkerMember
from broker.models import publish_card
from jetstream.ports import Messaging
from jetstream.subjects import Subjects, check_token, pool_id
from workers.engine import Capabilities, EngineInfo
from workers.errors import EngineStartFailed, RegistrationRefused
from workers.settings import WorkerSettings

CARD_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def worker_id(name: str | None) -> str:
    """Unique per process start: the given name (or a random one) plus an epoch."""
    base = check_token(name, "worker name") if name else f"w-{secrets.token_hex(3)}"
    return f"{base}-{int(time.time()):x}{secrets.token_hex(2)}"


def read_card_files(tokenizer_dir: str) -> dict[str, bytes]:
    """Tokenizer and template files. Raises EngineStartFailed when there is no tokenizer.json."""
    folder = Path(tokenizer_dir)
    files = {name: (folder / name).read_bytes() for name in CARD_FILES if (folder / name).is_file()}
    if "tokenizer.json" not in files:
        raise EngineStartFailed(f"no tokenizer.json in {folder}: an ingress could not tokenise for this model")
    return files


def build_card(settings: WorkerSettings, served_name: str, info: EngineInfo, files: dict[str, bytes]) -> ModelCard:
    """The card that this worker would publish if it were the first of its pool."""
    config: dict[str, Any] = msgspec.json.decode(files.get("tokenizer_config.json", b"{}"))
    kinds = list(info.kinds)
    if "chat_template.jinja" not in files and "chat_template" not in config and "chat" in kinds:
        kinds.remove("chat")
    return ModelCard(
        model=served_name,
        pool=pool_id(served_name, settings.namespace),
        namespace=settings.namespace,
        kinds=kinds,
        context_length=info.context_length,
        block_size=info.block_size,
        vocab_size=info.vocab_size,
        eos_token_ids=list(info.eos_token_ids),
        bos_token=_token_text(config.get("bos_token")),
        eos_token=_token_text(config.get("eos_token")),
        add_bos=bool(config.get("add_bos_token", False)),
        default_sampling=dict(info.default_sampling),
        created=time.time(),
    )


def _token_text(token: object) -> str | None:
    """A special token as text; older configs wrap it in a map."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


async def register_card(messaging: Messaging, subjects: Subjects, card: ModelCard, files: dict[str, bytes]) -> ModelCard:
    """Publish the card, or join the pool that has one. Raises RegistrationRefused naming what does not fit."""
    in_force = await publish_card(messaging, subjects, card, files)
    if in_force.block_size != card.block_size:
        raise RegistrationRefused(
            f"pool {card.pool} has block size {in_force.block_size}, this worker's engine has {card.block_size}: "
            "start it with the pool's block size"
        )
    return in_force


def build_member(
    settings: WorkerSettings, worker: str, card: ModelCard, info: EngineInfo, capabilities: Capabilities
) -> WorkerMember:
    """The value of this worker's lease."""
    return WorkerMember(
        worker=worker,
        pool=card.pool,
        model=card.model,
        role=settings.role,
        engine=info.engine,
        engine_version=info.version,
        slots=info.slots,
        block_size=info.block_size,
        blocks=info.blocks,
        max_model_len=info.context_length,
        epoch=secrets.randbits(63),
        started=time.time(),
        host=socket.gethostname(),
        pid=getpid(),
        labels=list(settings.labels),
        adapters=list(info.adapters),
        kv_events=capabilities.kv_events,
        step_tokens=info.step_tokens,
        roles=sorted(capabilities.roles),
        handover=info.handover,
        transfer_card=info.transfer_card,
    )
