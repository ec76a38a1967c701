"""An engine that repeats the prompt: the smallest one that implements `headrace.workers.engine.Engine`.

docs/add-an-engine.md walks through it. With this folder on PYTHONPATH:

    headrace up --engine echo_engine:EchoEngine
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Sequence as Seq
from pathlib import Path

from headrace.workers.engine import Capabilities, EngineConfig, EngineInfo, Load, Output, Sequence, Sink
from headrace.workers.errors import EngineDead, EngineOverloaded, RequestInvalid
from headrace.workers.kit import EngineBase, refuse_undeclared
from headrace.workers.sim.tokens import BUNDLED_TOKENIZER

SLOTS, BLOCKS, BLOCK_SIZE, CONTEXT = 16, 4096, 16, 2048
EOS = 2  # of the bundled tokenizer
TEMPLATE = "{{ messages[-1].content }}"  # a chat prompt is the last message and nothing else


class EchoEngine(EngineBase):
    """Answers with the prompt's tokens, one per step, then with the end token."""

    NAME = "echo engine"
    # Aggregated, no cache events, no log-probabilities. It can resume; and with no cache, salts keep apart what is cached.
    capabilities = Capabilities(cache_salt=True, resume_penalties=True, resume_repetition=True)  # penalties change no answer

    def __init__(self) -> None:
        super().__init__()
        self._running: dict[str, tuple[Sequence, int]] = {}  # and the tokens given so far
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="echo-"))

    async def start(self, config: EngineConfig, sink: Sink) -> EngineInfo:
        self._step_s = float(config.args.get("step_s", 0.001))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(BUNDLED_TOKENIZER / name, self._folder)
        (self._folder / "chat_template.jinja").write_text(TEMPLATE)
        self._task = asyncio.create_task(self._run(sink))
        return EngineInfo(
            engine="echo",
            version="1",
            tokenizer_dir=str(self._folder),
            context_length=CONTEXT,
            block_size=BLOCK_SIZE,
            blocks=BLOCKS,
            slots=SLOTS,
            vocab_size=49152,
            eos_token_ids=(EOS,),
        )

    async def submit(self, sequence: Sequence) -> None:
        self.check_alive()
        refuse_undeclared(self.capabilities, sequence)
        if len(sequence.token_ids) >= CONTEXT:
            raise RequestInvalid(f"{len(sequence.token_ids)} tokens leave no room in a context of {CONTEXT}", param="prompt")
        if len(self._running) >= SLOTS:
            raise EngineOverloaded(f"{SLOTS} sequences run already")
        self._running[sequence.id] = (sequence, 0)
        self._work.set()

    async def abort(self, ids: Seq[str]) -> None:
        for sequence_id in ids:
            self._running.pop(sequence_id, None)

    async def _run(self, sink: Sink) -> None:
        """Make steps while there are sequences. All outputs of a step leave in one call."""
        while True:
            await self._work.wait()
            await asyncio.sleep(self._step_s)
            outputs = [self._step(sequence, given) for sequence, given in list(self._running.values())]
            if not self._running:
                self._work.clear()
            sink(outputs)

    def _step(self, sequence: Sequence, given: int) -> Output:
        """Give a sequence one token. On a resume `token_ids` is the prompt and what was emitted: the answer goes on there."""
        sampling, prompt = sequence.sampling, sequence.token_ids[: sequence.prompt_tokens]
        place = len(sequence.token_ids) - len(prompt) + given
        ended = place >= len(prompt) and given >= sampling.min_tokens and not sampling.ignore_eos
        token = EOS if ended else prompt[place % len(prompt)]
        output = Output(id=sequence.id, ids=[token], cached_tokens=0 if given == 0 else None)
        if ended or (given >= sampling.min_tokens and token in sampling.stop_token_ids):
            output.finish, output.stop = "stop", token
        elif given + 1 == sampling.max_tokens:
            output.finish = "length"
        if output.finish is None:
            self._running[sequence.id] = (sequence, given + 1)
        else:
            del self._running[sequence.id]
        return output

    def load(self) -> Load:
        used = sum(len(sequence.token_ids) // BLOCK_SIZE + 1 for sequence, _ in self._running.values())
        return Load(running=len(self._running), blocks_used=used, blocks_total=BLOCKS)

    def check_alive(self) -> None:
        if self._task is None or self._task.done():
            raise EngineDead("the echo engine does not run")

    async def stop(self, grace_s: float) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=grace_s)
        shutil.rmtree(self._folder, ignore_errors=True)
