"""What cannot be continued on another worker once tokens have been given out.

An engine continues a request by taking prompt + emitted ids as a forced prefix.  State that it keeps beside the tokens is
lost by that: the position in a grammar, and penalty counts that only look at generated tokens.  Then the job ends with a
typed error instead of an answer that is silently another one.
"""

from __future__ import annotations

from headrace.broker.messages import Generation
from headrace.broker.protocol.run import Run
from headrace.workers.engine import Capabilities


def cannot_resume(run: Run, generation: Generation, capabilities: Capabilities) -> str | None:
    """Why this run cannot continue from what was emitted; None when it can, or when nothing was emitted."""
    if not any(log.ids and not log.settled for log in run.choices):
        return None
    if not capabilities.resume:
        return "its worker is gone and this engine cannot continue a partial answer"
    if generation.guided is not None and not capabilities.resume_guided:
        return "its worker is gone and the engine cannot continue structured output in the middle"
    sampling = generation.sampling
    if (sampling.presence_penalty or sampling.frequency_penalty) and not capabilities.resume_penalties:
        return "its worker is gone and the engine cannot carry presence or frequency penalties over"
    return None
