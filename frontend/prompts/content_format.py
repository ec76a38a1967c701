"""Detects the content format of a chat template: whether it expects a message's content as text or as a list of parts.

A template that loops over the content was written for parts. Given a string, it would loop over its characters, or miss the
parts of a message that has several.
"""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import nodes


def takes_parts(template: nodes.Template) -> bool:
    """Return True if the template loops over the content of messages."""
    passed = set(_macro_names(template))
    in_macros = {id(loop): macro for macro in template.find_all(nodes.Macro) for loop in macro.find_all(nodes.For)}
    for loop in template.find_all(nodes.For):
        looped = _bare(loop.iter)
        macro = in_macros.get(id(loop))
        if _is_content(looped):
            return True
        if isinstance(looped, nodes.Name) and (
            (macro.name, looped.name) in passed if macro is not None else looped.name == "content"
        ):
            return True
    return False


def _macro_names(template: nodes.Template) -> Iterator[tuple[str, str]]:
    """Yield (macro, parameter) for every parameter that some call fills with the content of a message."""
    macros = {macro.name: macro for macro in template.find_all(nodes.Macro)}
    for call in template.find_all(nodes.Call):
        macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
        if macro is None:
            continue
        for parameter, value in zip(macro.args, call.args, strict=False):
            if _is_content(_bare(value)):
                yield macro.name, parameter.name
        for keyword in call.kwargs:
            if _is_content(_bare(keyword.value)):
                yield macro.name, keyword.key


def _bare(node: nodes.Node | None) -> nodes.Node | None:
    """Return the expression without the filters and slices around it."""
    while isinstance(node, nodes.Filter) or (isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)):
        node = node.node
    return node


def _is_content(node: nodes.Node | None) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"
