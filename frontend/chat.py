"""`POST /v1/chat/completions`: messages → prompt → job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from frontend.decode import decode_body
from frontend.errors import BadRequest, FrontendError
from frontend.exchange import Exchange
from frontend.planning import Draft, Plan, Wishes, check_choices, check_kind, fit_of, make_draft, make_plan
from frontend.sampling import refuse_unsupported, unsupported
from frontend.schema.chat import ChatRequest, Message
from frontend.settings import FrontendSettings
from frontend.shelf import ModelShelf
from frontend.sse import CHAT_EVENTS

_decoder = msgspec.json.Decoder(ChatRequest)


class ChatApi:
    """Plans chat requests. Stateless but for the models it looks up."""

    def __init__(self, shelf: ModelShelf, settings: FrontendSettings) -> None:
        self._shelf = shelf
        self._settings = settings
        self.error_form = FrontendError.body

    async def plan(self, body: bytes, exchange: Exchange) -> Plan:
        """Raises a FrontendError or an AdmissionError."""
        request = decode_body(_decoder, body)
        draft, wishes = await self.draft(request, exchange, id_prefix="chatcmpl-")
        return make_plan(request, draft, wishes, CHAT_EVENTS)

    async def draft(self, request: ChatRequest, exchange: Exchange, *, id_prefix: str) -> tuple[Draft, Wishes]:
        """The conversation as jobs: what every API that speaks in messages comes down to.

        Raises a FrontendError or an AdmissionError.
        """
        _refuse(request)
        check_choices(request.n or 1, 1, self._settings)
        messages = plain_messages(request.messages)
        model = await self._shelf.get(request.model)
        check_kind(model, "chat")
        if model.template is None:
            message = f"{model.card.model!r} has no chat template; use /v1/completions"
            raise BadRequest(message, param="model", code="no_chat_template")
        continue_final = bool(request.continue_final_message)
        extra: Mapping[str, Any] | None = request.chat_template_kwargs
        if request.reasoning_effort is not None:
            extra = {"reasoning_effort": request.reasoning_effort, **(extra or {})}
        text = model.template.render(
            messages,
            add_generation_prompt=request.add_generation_prompt is not False and not continue_final,
            continue_final_message=continue_final,
            documents=request.documents,
            extra=extra,
        )
        wanted = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
        prompt = await model.encoder.encode(
            text,
            add_special_tokens=bool(request.add_special_tokens),
            fit=fit_of(request, model, wanted=wanted, param="messages"),
            salt=request.cache_salt,
        )
        wishes = Wishes(
            id_prefix=id_prefix,
            prompts=[prompt],
            wanted=wanted,
            top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        )
        return make_draft(request, exchange, model, self._settings, wishes), wishes


def _refuse(request: ChatRequest) -> None:
    refuse_unsupported(request)
    if request.tools and request.tool_choice != "none":
        raise unsupported("tools")
    if request.functions:
        raise unsupported("functions")
    if request.chat_template is not None:
        raise unsupported("chat_template", "cannot be sent with a request; the model brings its own")
    if request.modalities and request.modalities != ["text"]:
        raise unsupported("modalities", 'other than ["text"] are not supported here')
    if request.top_logprobs and not request.logprobs:
        raise BadRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    if request.add_generation_prompt and request.continue_final_message:
        raise BadRequest("continue_final_message cannot be combined with add_generation_prompt", param="continue_final_message")


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages with their text parts joined by newlines, as most templates want them. Raises BadRequest for other parts."""
    plain: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, str):
            plain.append(dict(message))
            continue
        if content is None:
            if message["role"] != "assistant":  # an assistant may have said nothing but called tools
                param = f"messages[{i}].content"
                raise BadRequest(f"missing required parameter: {param}", param=param, code="missing_required_parameter")
            plain.append({**message, "content": ""} if not message.get("tool_calls") else dict(message))
            continue
        texts = []
        for j, part in enumerate(content):
            param = f"messages[{i}].content[{j}]"
            if part["type"] not in ("text", "input_text", "refusal"):
                raise unsupported(f"{param}.type", f"{part['type']!r} is not supported here: text parts only")
            if "text" not in part:
                raise BadRequest(
                    f"missing required parameter: {param}.text", param=f"{param}.text", code="missing_required_parameter"
                )
            texts.append(part["text"])
        plain.append({**message, "content": "\n".join(texts)})
    return plain
