"""Calls as models of each format write them, for round trips and grammars."""

# ruff: noqa: RUF001

import json
from collections.abc import Callable, Sequence

type Call = tuple[str, dict[str, object]]


def _object(call: Call, arguments: str = "arguments") -> str:
    return json.dumps({"name": call[0], arguments: call[1]}, ensure_ascii=False)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{_object(call)}\n</tool_call>" for call in calls)


def llama(calls: Sequence[Call]) -> str:
    return "; ".join(_object(call, "parameters") for call in calls)


def mistral(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}" for name, arguments in calls)


def old_mistral(calls: Sequence[Call]) -> str:
    return f"[TOOL_CALLS] [{', '.join(map(_object, calls))}]"


def pythonic(calls: Sequence[Call]) -> str:
    written = [f"{name}({', '.join(f'{key}={_json(value)}' for key, value in given.items())})" for name, given in calls]
    return f"[{', '.join(written)}]"


def qwen(calls: Sequence[Call]) -> str:
    def call(name: str, arguments: dict[str, object]) -> str:
        parts = [
            f"<parameter={key}>\n{value if isinstance(value, str) else _json(value)}\n</parameter>\n"
            for key, value in arguments.items()
        ]
        return f"<tool_call>\n<function={name}>\n{''.join(parts)}</function>\n</tool_call>"

    return "\n".join(call(*item) for item in calls)


def deepseek(calls: Sequence[Call]) -> str:
    written = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return f"<｜tool▁calls▁begin｜>{'\n'.join(written)}<｜tool▁calls▁end｜>"


def deepseek_31(calls: Sequence[Call]) -> str:
    written = [f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(given)}<｜tool▁call▁end｜>" for name, given in calls]
    return f"<｜tool▁calls▁begin｜>{''.join(written)}<｜tool▁calls▁end｜>"


def harmony(calls: Sequence[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(arguments)}<|call|>"
        for name, arguments in calls
    )


def plain(calls: Sequence[Call]) -> str:
    return _object(calls[0]) if len(calls) == 1 else f"[{', '.join(map(_object, calls))}]"


WRITERS: list[tuple[str, Callable[[Sequence[Call]], str]]] = [
    ("hermes", hermes),
    ("llama3_json", llama),
    ("mistral", mistral),
    ("mistral", old_mistral),
    ("pythonic", pythonic),
    ("qwen3_coder", qwen),
    ("deepseek_v3", deepseek),
    ("deepseek_v31", deepseek_31),
    ("openai", harmony),
    ("json", plain),
]
