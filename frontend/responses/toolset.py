"""Gives models, which know a tool by one name only, the tools of the Responses API: namespaces, tool search, freeform tools.

The tools of a namespace are offered as functions of one flat list, and calls of them are returned under the name and the
namespace that the client gave. A tool is offered under the same name in every turn, so that the prompts of a conversation share
their beginning. Tools that a search has found, or that an item of the conversation adds, come after those of the request.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from headrace.frontend.chat_schema import AllowedTools, CustomTool, Function, FunctionName, NamedTool, Tool, ToolChoice
from headrace.frontend.errors import BadRequest
from headrace.frontend.generation.request_checks import KNOWN_TOOLS, NOT_RUN, hosted_type
from headrace.frontend.http.bodies import list_at, mapping_at, missing, text_at, unsupported, wrong

Item = Mapping[str, Any]
Kind = Literal["function", "custom", "tool_search"]

MAX_NAME = 64  # of a function, in OpenAI's APIs
DEFAULT_NAMESPACE = "functions"  # of tools without one, in OpenAI's APIs
SEARCH: Literal["tool_search"] = "tool_search"

_FORBIDDEN = re.compile(r"[^a-zA-Z0-9_-]")
_ADDING = ("tool_search_output", "additional_tools")  # types of items that have tools


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool as the client names it. The namespace of the tool search, which has no name, is empty."""

    kind: Kind
    name: str
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class Toolset:
    """The tools of a conversation. `by_offer` has them by the names under which the model is offered them."""

    tools: list[Tool] = field(default_factory=list)
    by_offer: dict[str, ClientTool] = field(default_factory=dict)
    offers: dict[tuple[str | None, str], str] = field(default_factory=dict)  # (namespace, name) → name for the model

    def offered(self, name: str, namespace: str | None) -> str:
        """Return the model's name of a tool, also of one that an earlier turn had and this one has not."""
        known = self.offers.get((namespace, name))
        return known or (name if namespace is None else flat_name(namespace, name))

    def chosen(self, name: str, namespace: str | None) -> str:
        """Return the model's name of a tool that `tool_choice` names; its namespace may be missing if only one has the name."""
        if namespace is None and (None, name) not in self.offers:
            inside = [offer for (_, each), offer in self.offers.items() if each == name]
            if len(inside) == 1:
                return inside[0]
        return self.offered(name, namespace)


@dataclass(frozen=True, slots=True)
class _Described:
    """A tool with its description and the path of that. `about` describes the namespace whose first tool it is."""

    tool: ClientTool
    described: Item
    where: str
    about: str = ""

    @property
    def key(self) -> tuple[str | None, str]:
        return self.tool.namespace, self.tool.name


def flat_name(namespace: str, name: str, salt: int = 0) -> str:
    """Return the name of the function that stands for a tool of a namespace. Long names and salted ones end in a digest."""
    flat = _FORBIDDEN.sub("_", name if namespace in ("", DEFAULT_NAMESPACE) else f"{namespace}__{name}")
    if len(flat) <= MAX_NAME and not salt:
        return flat
    digest = hashlib.sha256(f"{namespace}\0{name}\0{salt}".encode()).hexdigest()[:8]
    return f"{flat[: MAX_NAME - 1 - len(digest)]}_{digest}"


def toolset_of(given: Sequence[Item] | None, items: Iterable[tuple[Item, str]] = (), *, refuse_hosted: bool = False) -> Toolset:
    """Return the tools of a request and those that items of its conversation, with their paths, add. Raises BadRequest."""
    hosted: list[Tool] = []
    own: list[_Described] = []
    for i, tool in enumerate(given or ()):
        own += _described(tool, f"tools[{i}]", hosted, refuse_hosted)
    keys: set[tuple[str | None, str]] = set()
    for each in own:
        if each.key in keys and each.tool.namespace is not None:
            raise BadRequest(f"{each.where}: another tool has the name {each.tool.name[:100]!r}", param=each.where)
        keys.add(each.key)
    added: dict[tuple[str | None, str], _Described] = {}
    for item, where in items:
        if item.get("type") in _ADDING:
            for i, tool in enumerate(list_at(item.get("tools") or (), f"{where}.tools")):
                found = _described(tool, f"{where}.tools[{i}]", hosted, refuse_hosted)
                added |= {each.key: each for each in found if each.key not in keys}
    return _offered([*own, *added.values()], hosted)


def _described(given: Any, where: str, hosted: list[Tool], refuse_hosted: bool) -> Iterator[_Described]:
    """Yield the tools in a tool of the request. Those that the API's own servers run are added to `hosted`, or refused."""
    tool = mapping_at(given, where)
    kind = text_at(tool, "type", where)
    if kind == "namespace":
        namespace = _name(tool, where)
        about = tool.get("description") or ""
        inside = list_at(tool.get("tools") or (), f"{where}.tools")
        for i, each in enumerate(inside):
            place = f"{where}.tools[{i}]"
            kind = text_at(mapping_at(each, place), "type", place)
            if kind not in ("function", "custom"):
                raise unsupported(f"{place}.type", f"{kind[:100]!r} is not supported here: a namespace has function and custom")
            client = ClientTool("function" if kind == "function" else "custom", _name(each, place), namespace)
            yield _Described(client, each, place, f"{namespace}: {about}" if about and not i else "")
    elif kind == "function" or kind == "custom":
        yield _Described(ClientTool(kind, _name(tool, where)), tool, where)  # type: ignore[arg-type]
    elif kind == SEARCH and tool.get("execution") == "client":
        yield _Described(ClientTool(SEARCH, SEARCH, ""), {**tool, "name": SEARCH}, where)
    elif hosted_type(kind) is None:
        raise unsupported(f"{where}.type", f"{kind[:100]!r} {KNOWN_TOOLS}")
    elif refuse_hosted:
        raise unsupported(f"{where}.type", f"{kind[:100]!r} {NOT_RUN}")
    else:
        hosted.append(Tool(type=kind))


def _name(value: Item, where: str) -> str:
    if not (name := text_at(value, "name", where)):
        raise wrong(f"{where}.name", "a name")
    return name


def _offered(found: Sequence[_Described], hosted: Sequence[Tool]) -> Toolset:
    keys = [each.key for each in found]
    taken = {name for namespace, name in keys if namespace is None}
    shared = Counter(flat_name(namespace, name) for namespace, name in keys if namespace is not None)
    taken |= {flat for flat, count in shared.items() if count > 1}  # for none of these, so that their order does not matter
    tools, by_offer, offers = list(hosted), {}, {}
    for each in found:
        namespace, name = each.key
        if namespace is None:
            offer = name
        else:
            offer = next(flat for salt in itertools.count() if (flat := flat_name(namespace, name, salt)) not in taken)
            taken.add(offer)
        tools.append(_tool(each, offer))
        by_offer[offer], offers[each.key] = each.tool, offer
    return Toolset(tools, by_offer, offers)


def _tool(found: _Described, offer: str) -> Tool:
    """Return a tool as chat has it. Raises BadRequest."""
    described = {key: value for key, value in found.described.items() if key != "type"} | {"name": offer}
    if found.about:
        described["description"] = "\n\n".join(text for text in (described.get("description"), found.about) if text)
    try:
        if found.tool.kind == "custom":
            return Tool(type="custom", custom=_custom(described))
        return Tool(function=msgspec.convert(described, Function))
    except (msgspec.ValidationError, TypeError) as error:
        raise BadRequest(f"invalid value for {found.where}: {error}", param=found.where) from None


def _custom(described: dict[str, Any]) -> CustomTool:
    """Return a freeform tool, whose grammar this API has beside its type. Raises msgspec.ValidationError."""
    shape = described.get("format")
    if isinstance(shape, dict) and shape.get("type") == "grammar":
        grammar = {key: value for key, value in shape.items() if key != "type"}
        described = {**described, "format": {"type": "grammar", "grammar": grammar}}
    return msgspec.convert(described, CustomTool)


def choice_of(choice: str | Item | None, toolset: Toolset) -> str | ToolChoice | None:
    """Return the tool choice as chat has it. Raises BadRequest with the path of a field."""
    if choice is None or isinstance(choice, str):
        return choice
    kind = text_at(choice, "type", "tool_choice")
    if kind != "allowed_tools":
        if kind not in ("function", "custom", SEARCH):
            known = "function, custom, tool_search or allowed_tools"
            raise unsupported("tool_choice.type", f"{kind[:100]!r} is not supported here: {known}")
        (named,) = _named(choice, "tool_choice", toolset)
        return ToolChoice(type=named.type, function=named.function, custom=named.custom)
    allowed: list[NamedTool] = []
    for i, tool in enumerate(list_at(choice.get("tools") or (), "tool_choice.tools")):
        where = f"tool_choice.tools[{i}]"
        allowed += _named(mapping_at(tool, where), where, toolset)
    mode = choice.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise BadRequest(f"tool_choice.mode must be auto or required, got {str(mode)[:100]!r}", param="tool_choice.mode")
    if not allowed:
        raise missing("tool_choice.tools")
    return ToolChoice(type="allowed_tools", allowed_tools=AllowedTools(mode=mode, tools=allowed))


def _named(tool: Item, where: str, toolset: Toolset) -> list[NamedTool]:
    """Return the tools that one of a choice names; a namespace is all of its tools."""
    kind = tool.get("type", "function")
    if kind in ("function", "custom"):
        namespace = text_at(tool, "namespace", where) if tool.get("namespace") is not None else None
        return [_by_name(kind, toolset.chosen(_name(tool, where), namespace or None))]
    if kind == SEARCH:
        return [_by_name(kind, toolset.offered(SEARCH, ""))]
    if kind == "namespace":
        namespace = _name(tool, where)
        inside = [_by_name(each.kind, offer) for offer, each in toolset.by_offer.items() if each.namespace == namespace]
        if not inside:
            raise BadRequest(f"{where}.name {namespace[:100]!r} is none of the namespaces", param=f"{where}.name")
        return inside
    if isinstance(kind, str) and hosted_type(kind) is not None:
        return [NamedTool(type=kind)]
    raise unsupported(f"{where}.type", "other than function, custom, tool_search and namespace is not supported here")


def _by_name(kind: str, offer: str) -> NamedTool:
    name = FunctionName(name=offer)
    return NamedTool(type="custom", custom=name) if kind == "custom" else NamedTool(function=name)
