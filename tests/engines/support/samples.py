"""What models of many families write when they reason and call tools, in the words of their own formats.

`marks` are the special tokens of a family's tokenizer that its parser looks for. `call` has the same call in every format, to
the function `get_weather` with the city Köln.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """`text` is an answer with `calls` calls; `content` and `reasoning` are what is said besides."""

    text: str
    calls: int = 1
    content: str = ""
    reasoning: str = ""
    marks: tuple[str, ...] = ()


_JSON = '{"name": "get_weather", "arguments": {"city": "Köln"}}'
_PARAMETERS = '{"name": "get_weather", "parameters": {"city": "Köln"}}'
_ARGUMENTS = '{"city": "Köln"}'
_HERMES = f"<tool_call>\n{_JSON}\n</tool_call>"
_QWEN_XML = "<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln\n</parameter>\n</function>\n</tool_call>"
_GLM = "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n</tool_call>"
_GLM_MARKS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<think>", "</think>")
_DS_MARKS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>")
_THINK = ("<think>", "</think>")
_TOOL_CALL = ("<tool_call>", "</tool_call>")
_DSML = "｜DSML｜"


def _dsml(section: str, space: str = "") -> str:
    return (
        f'<{_DSML}{space}{section}>\n<{_DSML}{space}invoke name="get_weather">\n<{_DSML}{space}parameter name="city" '
        f'string="true">Köln</{_DSML}{space}parameter>\n</{_DSML}{space}invoke>\n</{_DSML}{space}{section}>'
    )


_KIMI_MARKS = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
)
_STEP_MARKS = (
    "<｜tool_calls_begin｜>",
    "<｜tool_calls_end｜>",
    "<｜tool_call_begin｜>",
    "<｜tool_call_end｜>",
    "<｜tool_sep｜>",
)
_INKLING_MARKS = (
    "<|message_model|>",
    "<|content_text|>",
    "<|content_thinking|>",
    "<|content_invoke_tool_json|>",
    "<|content_invoke_tool_text|>",
    "<|content_tool_error|>",
    "<|content_model_end_sampling|>",
    "<|end_message|>",
)
_PLAMO = {
    name: f"<|plamo:{name}:plamo|>"
    for side in ("begin", "end")
    for name in (
        f"{side}_tool_requests",
        f"{side}_tool_request",
        f"{side}_tool_name",
        f"{side}_tool_arguments",
        f"{side}_think",
    )
}
_HARMONY_MARKS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
_K3_MARKS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
_ATEM_MARKS = ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>")
_MM3 = "]<]minimax[>["
_HY3 = tuple(
    f"{a}{name}>" for name in ("tool_calls", "tool_call", "tool_sep", "arg_key", "arg_value", "think") for a in ("<", "</")
)

TOOLS: dict[str, Sample] = {
    "apertus": Sample(
        'Hm. <|tools_prefix|>[{"get_weather": {"city": "Köln"}}]<|tools_suffix|>',
        content="Hm. ",
        marks=("<|tools_prefix|>", "<|tools_suffix|>", "<|inner_prefix|>", "<|inner_suffix|>"),
    ),
    "deepseek_v3": Sample(
        "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        f"{_ARGUMENTS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        content="Hm.",
        marks=_DS_MARKS,
    ),
    "deepseek_v31": Sample(
        f"Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{_ARGUMENTS}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        content="Hm.",
        marks=_DS_MARKS,
    ),
    "deepseek_v32": Sample("Hm.\n\n" + _dsml("function_calls"), content="Hm.", marks=(_DSML, *_THINK)),
    "deepseek_v4": Sample("Hm.\n\n" + _dsml("tool_calls"), content="Hm.", marks=(_DSML, *_THINK)),
    "deepseek_v41": Sample("Hm.\n\n" + _dsml("calls", " "), content="Hm.", marks=(_DSML, *_THINK)),
    "dots": Sample(
        'Hm.<dots_function_call>\n<invoke name="get_weather">\n<parameter name="city">Köln</parameter>\n</invoke>\n'
        "</dots_function_call>",
        content="Hm.",
        marks=("<dots_function_call>", "</dots_function_call>"),
    ),
    "ernie45": Sample(f"Hm.{_HERMES}\n", content="Hm.", marks=(*_TOOL_CALL, *_THINK, "<response>", "</response>")),
    "functiongemma": Sample(
        "Hm.<start_function_call>call:get_weather{city:<escape>Köln<escape>}<end_function_call>",
        content="Hm.",
        marks=("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    "gemma4": Sample(
        'Hm.<|tool_call>call:get_weather{city:<|"|>Köln<|"|>}<tool_call|>',
        content="Hm.",
        marks=("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>", "<|turn>", "<turn|>", "<|tool_response>"),
    ),
    "gigachat3": Sample(f"Hm.<|function_call|>{_JSON}", content="Hm.", marks=("<|message_sep|>", "<|function_call|>")),
    "glm45": Sample(f"Hm.\n{_GLM}", content="Hm.", marks=_GLM_MARKS),
    "glm47": Sample(f"Hm.\n{_GLM}\n{_GLM}", calls=2, content="Hm.", marks=_GLM_MARKS),
    "granite": Sample(f"Hm.<|tool_call|>[{_JSON}, {_JSON}]", calls=2, content="Hm.", marks=("<|tool_call|>",)),
    "granite-20b-fc": Sample(f"<function_call> {_JSON}", marks=("<function_call>",)),
    "granite4": Sample(f"Hm.{_HERMES}", content="Hm.", marks=_TOOL_CALL),
    "hermes": Sample(f"Hm.{_HERMES}\n{_HERMES}", calls=2, content="Hm.", marks=_TOOL_CALL),
    "hunyuan_a13b": Sample(f"Hm.<tool_calls>[{_JSON}]</tool_calls>", content="Hm."),
    "hy_v3": Sample(
        "Hm.<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n</tool_call>\n"
        "</tool_calls>",
        content="Hm.",
        marks=_HY3,
    ),
    "hy_v4": Sample(
        "Hm.<tool_calls><tool_call>get_weather<arg_key>city</arg_key><arg_value>Köln</arg_value></tool_call></tool_calls>",
        content="Hm.",
        marks=_HY3,
    ),
    "inkling": Sample(
        "<|message_model|><|content_text|>Hm.<|end_message|><|message_model|><|content_invoke_tool_json|>"
        '{"name":"get_weather","args":{"city":"Köln"}}<|end_message|>',
        content="Hm.",
        marks=_INKLING_MARKS,
    ),
    "internlm": Sample(
        f"Hm.<|action_start|><|plugin|>{_PARAMETERS}<|action_end|>",
        content="Hm.",
        marks=("<|action_start|>", "<|plugin|>", "<|action_end|>"),
    ),
    "jamba": Sample(f"Hm.<tool_calls>[{_JSON}]</tool_calls>", content="Hm.", marks=("<tool_calls>", "</tool_calls>")),
    "k2_horizon": Sample(
        "Hm.<ifm|tool_calls><ifm|tool_call>get_weather<ifm|arg_key>city</ifm|arg_key><ifm|arg_value>Köln</ifm|arg_value>"
        "</ifm|tool_call></ifm|tool_calls>",
        content="Hm.",
        marks=("<ifm|tool_calls>", "</ifm|tool_calls>", "<ifm|tool_call>", "</ifm|tool_call>"),
    ),
    "kimi_k2": Sample(
        "Hm.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{_ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
        content="Hm.",
        marks=(*_KIMI_MARKS, *_THINK),
    ),
    "kimi_k3": Sample(
        '<|open|>response<|sep|>Hm.<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>Köln<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
        content="Hm.",
        marks=_K3_MARKS,
    ),
    "lfm2": Sample(
        'Hm.<|tool_call_start|>[get_weather(city="Köln")]<|tool_call_end|>',
        content="Hm.",
        marks=("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "ling3": Sample(f"Hm.\n{_GLM}", content="Hm.", marks=_GLM_MARKS),
    "llama3_json": Sample(_PARAMETERS, marks=("<|python_tag|>",)),
    "llama4_json": Sample(_PARAMETERS, marks=("<|python_tag|>",)),
    "llama4_pythonic": Sample('[get_weather(city="Köln")]', marks=("<|python_start|>", "<|python_end|>")),
    "longcat": Sample(f"Hm.<longcat_tool_call>\n{_JSON}\n</longcat_tool_call>", content="Hm."),
    "mimo": Sample(f"Hm.{_QWEN_XML}", content="Hm.", marks=(*_TOOL_CALL, *_THINK)),
    "minicpm5": Sample('Hm.<function name="get_weather"><param name="city">Köln</param></function>', content="Hm."),
    "minimax_m2": Sample(
        'Hm.<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Köln</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        content="Hm.",
        marks=("<minimax:tool_call>", "</minimax:tool_call>", *_THINK),
    ),
    "minimax_m3": Sample(
        f'Hm.{_MM3}<tool_call>\n{_MM3}<invoke name="get_weather">\n{_MM3}<city>Köln{_MM3}</city>\n{_MM3}</invoke>\n'
        f"{_MM3}</tool_call>",
        content="Hm.",
        marks=(_MM3, "<mm:think>", "</mm:think>"),
    ),
    "mistral": Sample(
        f"Hm.[TOOL_CALLS]get_weather[ARGS]{_ARGUMENTS}", content="Hm.", marks=("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]")
    ),
    "muse_glimmer": Sample(
        '<|start|>assistant to=f.get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather">\n'
        '<atem:parameter name="city">Köln</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eot|>',
        marks=_ATEM_MARKS,
    ),
    "olmo3": Sample('<function_calls>get_weather(city="Köln")</function_calls>'),
    "openai": Sample(
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        f"<|constrain|>json<|message|>{_ARGUMENTS}<|call|>",
        marks=_HARMONY_MARKS,
    ),
    "phi4_mini_json": Sample(f"functools[{_JSON}]"),
    "plamo3": Sample(
        f"Hm.{_PLAMO['begin_tool_requests']}{_PLAMO['begin_tool_request']}{_PLAMO['begin_tool_name']}get_weather"
        f"{_PLAMO['end_tool_name']}{_PLAMO['begin_tool_arguments']}<|plamo:constrain|>json<|plamo:msg|>{_ARGUMENTS}"
        f"{_PLAMO['end_tool_arguments']}{_PLAMO['end_tool_request']}{_PLAMO['end_tool_requests']}",
        content="Hm.",
        marks=("<|plamo:begin_", "<|plamo:end_", ":plamo|>", "<|plamo:constrain|>", "<|plamo:msg|>", "<|plamo:tag|>"),
    ),
    "poolside_v1": Sample(f"Hm.\n{_GLM}", content="Hm.", marks=_GLM_MARKS),
    "pythonic": Sample('[get_weather(city="Köln"), get_weather(city="Bonn")]', calls=2),
    "qwen3_coder": Sample(f"Hm.{_QWEN_XML}\n{_QWEN_XML}", calls=2, content="Hm.", marks=(*_TOOL_CALL, *_THINK)),
    "qwen3_json": Sample(f"Hm.{_HERMES}", content="Hm.", marks=_TOOL_CALL),
    "qwen3_xml": Sample(f"Hm.{_QWEN_XML}", content="Hm.", marks=(*_TOOL_CALL, *_THINK)),
    "seed_oss": Sample(
        "Hm.<seed:tool_call>\n<function=get_weather>\n<parameter=city>Köln</parameter>\n</function>\n</seed:tool_call>",
        content="Hm.",
        marks=("<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>"),
    ),
    "step3": Sample(
        'Hm.<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">'
        '<steptml:parameter name="city">Köln</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>',
        content="Hm.",
        marks=_STEP_MARKS,
    ),
    "step3p5": Sample(f"Hm.{_QWEN_XML}", content="Hm.", marks=(*_TOOL_CALL, *_THINK)),
    "xlam": Sample(f"[{_JSON}]"),
    "cohere_command3": Sample(
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Köln"}}]<|END_ACTION|>',
        marks=(
            "<|START_ACTION|>",
            "<|END_ACTION|>",
            "<|START_THINKING|>",
            "<|END_THINKING|>",
            "<|START_RESPONSE|>",
            "<|END_RESPONSE|>",
        ),
    ),
}
TOOLS["cohere_command4"] = TOOLS["cohere_command3"]


def _thinking(before: str, after: str, *marks: str) -> Sample:
    """Reasoning and content, with these marks around the reasoning."""
    return Sample(
        f"{before}Grüße, 🌊{after}Well.", calls=0, content="Well.", reasoning="Grüße, 🌊", marks=marks or (before, after)
    )


REASONING: dict[str, Sample] = {
    name: _thinking("<think>", "</think>", *_THINK, *_TOOL_CALL, *_KIMI_MARKS)
    for name in (
        "deepseek_r1",
        "deepseek_v3",
        "deepseek_v4",
        "deepseek_v41",
        "ernie45",
        "glm45",
        "glm47",
        "granite_thinking_parser",
        "holo2",
        "hy_v3",
        "hy_v4",
        "kimi_k2",
        "ling3",
        "mimo",
        "minicpmv",
        "minimax_m2",
        "nemotron_v3",
        "olmo3",
        "qwen3",
        "step3p5",
    )
} | {
    "cohere_command3": _thinking("<|START_THINKING|>", "<|END_THINKING|><|START_RESPONSE|>", *TOOLS["cohere_command3"].marks),
    "cohere_command4": _thinking("<|START_THINKING|>", "<|END_THINKING|><|START_RESPONSE|>", *TOOLS["cohere_command3"].marks),
    "gemma4": _thinking("<|channel>thought\n", "<channel|>", *TOOLS["gemma4"].marks),
    "granite": _thinking("Here is my thought process: ", " Here is my response: "),
    "hunyuan_a13b": _thinking("<think>\n", "\n</think>\n<answer>\n", *_THINK),
    "inkling": Sample(
        "<|message_model|><|content_thinking|>Grüße, 🌊<|end_message|><|message_model|><|content_text|>Well.<|end_message|>",
        calls=0,
        content="Well.",
        reasoning="Grüße, 🌊",
        marks=_INKLING_MARKS,
    ),
    "k2_horizon": _thinking("<ifm|think>", "</ifm|think>", "<ifm|think>", "</ifm|think>", *_THINK),
    "kimi_k3": Sample(
        "<|open|>think<|sep|>Grüße, 🌊<|close|>think<|sep|><|open|>response<|sep|>Well.<|close|>response<|sep|>",
        calls=0,
        content="Well.",
        reasoning="Grüße, 🌊",
        marks=_K3_MARKS,
    ),
    "minimax_m3": _thinking("<mm:think>", "</mm:think>", *TOOLS["minimax_m3"].marks),
    "minimax_m2_append_think": Sample("Grüße, 🌊</think>Well.", calls=0, content="<think>Grüße, 🌊</think>Well.", marks=_THINK),
    "mistral": _thinking("[THINK]", "[/THINK]", *TOOLS["mistral"].marks),
    "muse_glimmer": Sample(
        "<|start|>assistant to=self<|message|>Grüße, 🌊<|eom|><|start|>assistant to=user<|message|>Well.<|eot|>",
        calls=0,
        content="Well.",
        reasoning="Grüße, 🌊",
        marks=_ATEM_MARKS,
    ),
    "openai_gptoss": Sample(
        "<|channel|>analysis<|message|>Grüße, 🌊<|end|><|start|>assistant<|channel|>final<|message|>Well.",
        calls=0,
        content="Well.",
        reasoning="Grüße, 🌊",
        marks=_HARMONY_MARKS,
    ),
    "plamo3": Sample(
        f"{_PLAMO['begin_think']}Grüße, 🌊{_PLAMO['end_think']}Well.",
        calls=0,
        content="Well.",
        reasoning="Grüße, 🌊",
        marks=TOOLS["plamo3"].marks,
    ),
    "poolside_v1": _thinking("<think>", "</think>", *_THINK, *_TOOL_CALL, "<assistant>"),
    "step3": Sample("Grüße, 🌊</think>Well.", calls=0, content="Well.", reasoning="Grüße, 🌊", marks=_THINK),
    "seed_oss": _thinking("<seed:think>", "</seed:think>", *TOOLS["seed_oss"].marks),
}
