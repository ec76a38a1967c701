"""Registers a started engine as a worker of a pool: builds the card, reads its files, and builds the lease value."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections.abc import Sequence
from os import getpid
from pathlib import Path
from typing import Any

import msgspec
import structlog

from headrace.base.errors import HeadraceError
from headrace.broker.codec import decode
from headrace.broker.errors import WireError
from headrace.broker.membership.members import machine_id
from headrace.broker.messages.members import WorkerMember
from headrace.broker.models.card_store import pool_workers
from headrace.broker.models.cards import ModelCard, readable_card
from headrace.broker.models.directory import publish_card
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects, pool_id
from headrace.jetstream.topology import Topology
from headrace.workers.engine import Capabilities, EngineInfo
from headrace.workers.errors import EngineStartFailed, RegistrationRefused
from headrace.workers.parsing.selection import ParserChoice
from headrace.workers.settings import WorkerSettings

_START_TIME = 19  # in clock ticks since the boot: field 22 of proc(5), counted from the one behind the name


def process_age_s(stat: Path = Path("/proc/self/stat")) -> float:
    """Return the age of this process in seconds, the imports included; 0.0 where the kernel does not tell."""
    try:
        fields = stat.read_text().rpartition(")")[2].split()
        ticks = int(fields[_START_TIME])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0
    return max(age_s, 0.0)


log = structlog.get_logger()

NO_PARSERS = ParserChoice()
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
CARD_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", *TEMPLATE_FILES)
MORE_TEMPLATES = "additional_chat_templates/*.jinja"


def read_card_files(tokenizer_dir: str, *, template: bytes | None = None) -> dict[str, bytes]:
    """Read the tokenizer and template files. `template` takes the place of all of the model's own.

    Raises EngineStartFailed if there is no tokenizer.json.
    """
    folder = Path(tokenizer_dir)
    files = {name: (folder / name).read_bytes() for name in CARD_FILES if (folder / name).is_file()}
    files |= {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.glob(MORE_TEMPLATES))}
    if "tokenizer.json" not in files:
        raise EngineStartFailed(f"no tokenizer.json in {folder}: an ingress could not tokenise for this model")
    if template is not None:
        own = {name for name in files if name in TEMPLATE_FILES or name.startswith(MORE_TEMPLATES.partition("/")[0])}
        files = {name: data for name, data in files.items() if name not in own} | {TEMPLATE_FILES[0]: template}
    return files


def build_card(
    settings: WorkerSettings, served_name: str, info: EngineInfo, files: dict[str, bytes], parsers: ParserChoice = NO_PARSERS
) -> ModelCard:
    """Build the card that this worker would publish if it were the first of its pool."""
    config: dict[str, Any] = msgspec.json.decode(files.get("tokenizer_config.json", b"{}"))
    kinds = list(info.kinds)
    if "chat" in kinds and "chat_template" not in config and not any(name in files for name in TEMPLATE_FILES):
        kinds.remove("chat")
    kinds = _chosen(kinds, settings.endpoints)
    return ModelCard(
        model=served_name,
        pool=pool_id(served_name, settings.namespace),
        namespace=settings.namespace,
        kinds=kinds,
        labels=list(info.labels),
        context_length=info.context_length,
        block_size=_pool_block(settings, info),
        vocab_size=info.vocab_size,
        eos_token_ids=list(info.eos_token_ids),
        bos_token=_token_text(config.get("bos_token")),
        eos_token=_token_text(config.get("eos_token")),
        default_sampling={**info.default_sampling, **settings.default_sampling},
        default_max_tokens=settings.default_max_tokens,
        template_kwargs=dict(settings.template_kwargs),
        aliases=list(settings.aliases),
        adapters=sorted(info.adapters),
        tool_parser=parsers.tool,
        reasoning_parser=parsers.reasoning,
        prompt_embeds=info.prompt_embeds,
        media=dict(info.media),
        created=time.time(),
    )


def _pool_block(settings: WorkerSettings, info: EngineInfo) -> int:
    """Return the block size of the pool, if this worker is its first. Raises EngineStartFailed if the engine's does not fit."""
    size = settings.pool_block or info.block_size
    if info.block_size % size:
        raise EngineStartFailed(f"pool_block must divide the block size of the engine, {info.block_size}, got {size}")
    if size != info.block_size and not settings.fleet:
        raise EngineStartFailed(f"pool_block is {size}, the engine's block size {info.block_size}: give this worker a fleet")
    return size


def _chosen(kinds: list[str], wanted: Sequence[str]) -> list[str]:
    """Return the kinds of requests that clients may make, in the engine's order. Raises EngineStartFailed for one it lacks."""
    for kind in wanted:
        if kind not in kinds:
            raise EngineStartFailed(f"endpoints: this model serves {', '.join(kinds) or 'nothing'}, not {kind!r}")
    return [kind for kind in kinds if kind in wanted] if wanted else kinds


def _token_text(token: object) -> str | None:
    """Return a special token as text. Older configs wrap it in a map."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


async def register_card(
    messaging: Messaging,
    subjects: Subjects,
    card: ModelCard,
    files: dict[str, bytes],
    *,
    key: bytes = b"",
    engine_block: int = 0,
) -> ModelCard:
    """Publish the card, or join the pool that has one.

    `engine_block`: the tokens of this engine's blocks, if they may be longer than the pool's, because it is of a fleet with a
    name; 0 = they are those of the card. Raises RegistrationRefused if they cannot be cut into the pool's.
    """
    await _log_changed_parsers(messaging, subjects, card)
    in_force = await publish_card(messaging, subjects, card, files, key=key)
    own = engine_block or card.block_size
    if own == in_force.block_size or (engine_block and in_force.block_size and engine_block % in_force.block_size == 0):
        return in_force
    raise RegistrationRefused(
        f"pool {card.pool} has block size {in_force.block_size}, this worker's engine has {own}: start it with the pool's "
        "block size, in a fleet of its own (--fleet) with a multiple of that, or once the pool's workers have ended (`headrace "
        "worker status` names them, `headrace worker drain ID` ends one): a pool without a worker takes any block size"
    )


async def refuse_mixed_engines(messaging: Messaging, subjects: Subjects, *, pool: str, engine: str, fleet: str = "") -> None:
    """Raise RegistrationRefused while workers of another engine serve the pool, unless they are of another fleet by name.

    Engines sample, hash and pool differently, so an answer that moved between two of them would not be the one it began as.
    An operator who names fleets for them has agreed to that.
    """
    for member in await pool_workers(messaging, subjects, pool):
        apart = bool(fleet and member.fleet) and fleet != member.fleet
        if member.engine and member.engine != engine and not apart:
            raise RegistrationRefused(
                f"pool {pool} is served by {member.engine} (worker {member.worker}), and this worker runs {engine}: a pool "
                "is one engine; give this one another --served-name, or both engines a --fleet of their own"
            )


async def with_longest_context(messaging: Messaging, subjects: Subjects, card: ModelCard, *, fleet: str) -> ModelCard:
    """Return the card with the context length of the fleet that takes the longest requests.

    Routers keep a request from workers whose context is too short for it. Without fleets a pool has one context length, that
    of the worker that has started last.
    """
    if not fleet:
        return card
    members = await pool_workers(messaging, subjects, card.pool)
    longest = max([card.context_length, *(member.max_model_len for member in members if member.fleet not in ("", fleet))])
    return msgspec.structs.replace(card, context_length=longest)


async def refuse_used_login(messaging: Messaging, subjects: Subjects, *, pool: str, worker: str) -> None:
    """Raise RegistrationRefused if the worker of this process's login lives already: an id is of one start."""
    if await messaging.bucket(subjects.bucket("members")).get(subjects.worker_key(pool, worker)) is not None:
        raise RegistrationRefused(
            f"a process has registered as worker {worker} with this login, which is for one start: make another one "
            "(`headrace init --worker ID`)"
        )


async def _log_changed_parsers(messaging: Messaging, subjects: Subjects, card: ModelCard) -> None:
    """Log a warning if the stored card has other parsers than this worker.

    A worker with other parsers is not refused, because otherwise parsers could not be changed while other workers serve. The
    parts of an answer mean the same whichever parser produced them; only the format that the model is asked to write may
    differ.
    """
    entry = await messaging.bucket(subjects.bucket("models")).get(card.pool)
    if entry is None:
        return
    with contextlib.suppress(WireError):
        old = decode(ModelCard, entry.value)
        before, now = (old.tool_parser, old.reasoning_parser), (card.tool_parser, card.reasoning_parser)
        if before != now:
            log.warning("card.parsers_changed", pool=card.pool, before=before, now=now)


def build_member(
    settings: WorkerSettings, worker: str, card: ModelCard, info: EngineInfo, capabilities: Capabilities
) -> WorkerMember:
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
        start_s=process_age_s(),
        host=socket.gethostname(),
        pid=getpid(),
        machine=machine_id(),
        labels=[*settings.labels, *([f"zone={settings.zone}"] if settings.zone else [])],
        zone=settings.zone,
        adapters=list(info.adapters),
        kv_events=capabilities.kv_events,
        step_tokens=info.step_tokens,
        fleet=settings.fleet,
        price=settings.price,
        roles=sorted(capabilities.roles),
        handover=info.handover,
        encoder=info.encoder,
        ranks=info.ranks,
        transfer_card=info.transfer_card,
        tool_parser=card.tool_parser,
        reasoning_parser=card.reasoning_parser,
    )


# Stores the model's card again when the broker has lost it, because without the card the model is not discoverable.

CHECK_S = 5.0  # seconds between two checks


class CardKeeper:
    """Checks the card while the session runs. Cards of served models do not expire, so a missing one was lost."""

    def __init__(
        self, messaging: Messaging, subjects: Subjects, card: ModelCard, files: dict[str, bytes], *, key: bytes = b""
    ) -> None:
        """`key` signs the card, which is also stored again when another process has stored one without it."""
        self._key = key
        self._messaging = messaging
        self._subjects = subjects
        self._card = card
        self._files = files
        self._cards = messaging.bucket(subjects.bucket("models"))
        stores = Topology(subjects).object_stores()
        self._file_stream = next(spec for spec in stores if spec.name == subjects.bucket("models")).stream().name

    async def run(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            try:
                if await self._is_lost():
                    await register_card(self._messaging, self._subjects, self._card, self._files, key=self._key)
                    log.warning("card.stored_again", pool=self._card.pool)
            except HeadraceError as error:  # The next check is soon enough.
                log.debug("card.not_seen", pool=self._card.pool, error=str(error))

    async def _is_lost(self) -> bool:
        entry = await self._cards.get(self._card.pool)
        if entry is None or (self._key and readable_card(entry.key, entry.value, signed_with=self._key) is None):
            return True
        return bool(self._files) and not (await self._messaging.stream_state(self._file_stream)).messages
