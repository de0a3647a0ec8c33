"""Formats by name, and what chat templates and prompts say of them."""

# ruff: noqa: RUF001

import pytest

from server.parsers.registry import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    reasoning_format,
    reasoning_format_of,
    tool_format,
    tool_format_of,
)


def test_formats_have_names():
    """Every name leads to a format, an unknown one to the list of those that are known."""
    for name in TOOL_FORMATS:
        assert tool_format(name) is TOOL_FORMATS[name]
    for name in REASONING_FORMATS:
        assert reasoning_format(name).name == name
    with pytest.raises(ValueError, match=r"tool call parser 'x'.*hermes.*qwen3_xml"):
        tool_format("x")
    with pytest.raises(ValueError, match=r"reasoning parser 'x'.*deepseek_r1"):
        reasoning_format("x")


@pytest.mark.parametrize(
    ("template", "calls", "thoughts"),
    [
        ('<tool_call>\\n{\\"name\\": <function-name>, ... </think>', "hermes", "qwen3"),
        ("<tool_call>\n<function=example_function_name>\n<parameter=", "qwen3_coder", None),
        ("{{ '[TOOL_CALLS] [' }}", "mistral", None),
        ('<|start_header_id|> {"name": function name, "parameters": dict} <|python_tag|>', "llama3_json", None),
        ('<|start_header_id|> respond with \'{\\"name\\": , \\"parameters\\": \'', "llama3_json", None),
        ("<|header_start|> <|python_start|>", "pythonic", None),
        ("[func_name1(params_name1=params_value1)] <|start_header_id|>", "pythonic", None),
        ("<|start|>assistant<|channel|>analysis", "openai", "openai_gptoss"),
        ("<｜Assistant｜> </think> <｜tool▁calls▁begin｜> ```json", "deepseek_v3", "deepseek_r1"),
        ("<｜Assistant｜></think><｜tool▁calls▁begin｜>", "deepseek_v31", "deepseek_r1"),
        ("<|im_start|>{{ message.content }}", "json", None),
        ("<|start_header_id|>{{ message.content }}", "json", None),
    ],
)
def test_templates_tell_their_formats(template: str, calls: str, thoughts: str | None):
    """The defaults for a template's text."""
    assert (tool_format_of(template), reasoning_format_of(template)) == (calls, thoughts)


@pytest.mark.parametrize(
    ("name", "prompt", "opened", "thinks"),
    [
        ("qwen3", "<|im_start|>assistant\n", False, True),
        ("qwen3", "<|im_start|>assistant\n<think>\n", True, True),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False, False),
        ("qwen3", "What is <think>?<|im_end|>\n<|im_start|>assistant\nIt is", False, False),
        ("deepseek_r1", "<｜Assistant｜>", True, True),
        ("deepseek_r1", "<｜Assistant｜><think>\n", True, True),
        ("deepseek_r1", "<｜Assistant｜></think>", False, False),
        ("openai_gptoss", "<|start|>assistant", False, True),
        ("openai_gptoss", "<|start|>assistant<|channel|>analysis<|message|>", True, True),
        ("openai_gptoss", "<|start|>assistant<|channel|>final<|message|>", False, False),
    ],
)
def test_prompts_tell_whether_the_model_thinks(name: str, prompt: str, opened: bool, thinks: bool):
    """Whether the answer begins inside a thought, and whether one is expected at all."""
    found = reasoning_format(name)
    assert (found.opened(prompt), found.thinks(prompt)) == (opened, thinks)
