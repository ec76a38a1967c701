"""Plans requests of `POST /v1/audio/transcriptions` and `/v1/audio/translations`: a chat with a model that hears.

No engine here has a way of its own for transcriptions.  A chat model that takes sounds gets the file and an instruction, which
is also how vLLM asks most models of this kind.
"""

from __future__ import annotations

import base64
from functools import partial
from typing import Any, Literal

from headrace.frontend.errors import BadRequest, FrontendError
from headrace.frontend.generation.plan import Plan
from headrace.frontend.http.http_exchange import HttpExchange
from headrace.frontend.openai.chat_adapter import ChatAdapter, ChatOptions
from headrace.frontend.prompts.model_cache import ModelCache
from headrace.frontend.schema.chat import ChatRequest
from headrace.frontend.transcriptions.form import FILE, Speech, read_form
from headrace.frontend.transcriptions.schema import SpeechForm
from headrace.frontend.transcriptions.writers import TranscriptEvents, TranscriptWriter

Task = Literal["transcribe", "translate"]

_SOUND = "messages[0].content[0]"  # how the chat's errors name the file


class SpeechApi:
    """Plans one of both tasks."""

    def __init__(self, task: Task, chat: ChatAdapter, model_cache: ModelCache) -> None:
        self._task = task
        self._chat = chat
        self._model_cache = model_cache
        self.error_form = FrontendError.body

    async def plan(self, body: bytes, exchange: HttpExchange) -> Plan:
        """Read a form and plan its answer. Raises a FrontendError or an AdmissionError."""
        content_type = exchange.header(b"content-type") or ""
        speech = await exchange.aside(partial(read_form, body, content_type))
        if speech.form.language is not None and self._task == "translate":
            raise BadRequest("language is a parameter of transcriptions, not of translations", param="language")
        model = await self._model_cache.get(speech.form.model)
        if "audio" not in model.card.media:
            raise BadRequest(
                f"{model.card.model!r} takes no sounds, so it cannot {self._task} speech",
                param="model",
                code="unsupported_media",
            )
        chat = await exchange.aside(partial(chat_of, speech, self._task))
        try:
            plan = await self._chat.plan_chat(chat, exchange, ChatOptions(id_prefix="transcr-"))
        except BadRequest as error:
            if error.param is None or not error.param.startswith(_SOUND):
                raise
            raise BadRequest(str(error).replace(error.param, FILE), param=FILE, code=error.code) from None
        writer = TranscriptEvents if speech.form.stream else TranscriptWriter
        return plan.answered_by(writer(plan.counter, speech.form.response_format))


def chat_of(speech: Speech, task: Task) -> ChatRequest:
    """Return the chat that asks for the text of the speech."""
    form = speech.form
    url = f"data:;base64,{base64.b64encode(speech.sound).decode()}"
    content: list[dict[str, Any]] = [
        {"type": "audio_url", "audio_url": {"url": url}},
        {"type": "text", "text": instruction(form, task)},
    ]
    return ChatRequest(
        model=form.model,
        messages=[{"role": "user", "content": content}],
        temperature=form.temperature,
        top_p=form.top_p,
        seed=form.seed,
        max_completion_tokens=form.max_completion_tokens,
        stream=form.stream,
        user=form.user,
        include_reasoning=False,
    )


def instruction(form: SpeechForm, task: Task) -> str:
    """Return what the model is told to do."""
    if task == "translate":
        told = "Translate the speech in this recording into English. Answer with the translation only."
    else:
        spoken = f" The language is {form.language}." if form.language else ""
        told = f"Transcribe the speech in this recording, word for word.{spoken} Answer with the transcript only."
    return f"{told}\n{form.prompt}" if form.prompt else told
