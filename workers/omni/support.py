"""Declares what the adapter for vLLM-Omni can do over all of its settings. Needs no vLLM-Omni."""

from __future__ import annotations

from headrace.workers.engine import Capabilities
from headrace.workers.engine_support import EngineSupport, words
from headrace.workers.vllm.convert import GUIDED

ABILITIES = Capabilities(resume_repetition=True, logprobs=True, prompt_logprobs=True, guided=GUIDED, cache_salt=True)

SUPPORT = EngineSupport(name="omni", title="vLLM-Omni 0.30 (stand-in)", words=words(ABILITIES, ("chat", "completion")))
