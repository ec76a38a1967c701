"""Declares what the diffusion engine can do over all of its settings."""

from __future__ import annotations

from headrace.workers.engine import Capabilities
from headrace.workers.engine_support import EngineSupport, words

ABILITIES = Capabilities(resume=False, seeds=False)

SUPPORT = EngineSupport(name="diffusion", title="diffusion (stand-in)", words=words(ABILITIES, ("image", "video")))
