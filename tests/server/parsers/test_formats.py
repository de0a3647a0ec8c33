"""What each format's machine finds in texts as models write them, whole and in pieces."""

# ruff: noqa: RUF001

import pytest

from tests.server.parsers.reading import machine_of, run, told, ways

WEATHER = '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}'
CALL = '0:get_weather{"city": "Paris", "days": 3}.'

HERMES = [
    (f"<tool_call>\n{WEATHER}\n</tool_call>", CALL),
    (f"Let me see.\n\n<tool_call>\n{WEATHER}\n</tool_call>", f"`Let me see.`{CALL}"),
    (
        f'<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>',
        CALL + "1:now{}.",
    ),
    (f"a<tool_call>{WEATHER}</tool_call> b <tool_call>{WEATHER}</tool_call> c", f"`a`{CALL}`b`1{CALL[1:]}`c`"),
    ('<tool_call>\n{"name": "now"}\n</tool_call>', "0:now{}."),
    ('<tool_call>{"name": "now", "arguments": null}</tool_call>', "0:now{}."),
    ('<tool_call>{"arguments": {"x": 1}, "name": "now"}</tool_call>', '0:now{"x": 1}.'),
    ('<tool_call>{"parameters": {"x": 1}, "name": "now"}</tool_call>', '0:now{"x": 1}.'),
    ('<tool_call>{"name": "now", "arguments": "{\\"x\\": [1]}"}</tool_call>', '0:now{"x": [1]}.'),
    ('<tool_call>{"name": "a", "name": "b", "arguments": {}}</tool_call>', "0:a{}."),
    ('<tool_call>{"name": "unknown", "arguments": {"x": {}}}</tool_call>', '0:unknown{"x": {}}.'),
    ('<tool_call>{"name": "поиск-web_2", "arguments": {"ключ": "да"}}</tool_call>', '0:поиск-web_2{"ключ": "да"}.'),
    ('<tool_call>{"name": "\\u043f", "arguments": {}}</tool_call>', "0:п{}."),
    ('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', "0:?{}."),
    (
        '<tool_call>{"name": "n", "arguments": {"a": "</tool_call>}\\"<tool_call>{", "b\\\\": "\\u00e9"}}</tool_call>',
        '0:n{"a": "</tool_call>}\\"<tool_call>{", "b\\\\": "\\u00e9"}.',
    ),
    ('<tool_call>{"name": "now", "arguments": {"a": "x\ny"}}</tool_call>', '0:now{"a": "x\\ny"}.'),
    ('<tool_call>{"name": "now", "arguments": {}}\n{"name": "b", "arguments": {}}</tool_call>', "0:now{}.1:b{}."),
    ('<tool_call>[{"name": "now"}, {"name": "b"}]</tool_call>', "0:now{}.1:b{}."),
    ('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par', '0:get_weather{"city": "Par'),
    ('<tool_call>\n{"name": "get_we', '`<tool_call>\n{"name": "get_we`'),
    ("a <tool_ca", "`a <tool_ca`"),
    ("a <tool_cat> b", "`a <tool_cat> b`"),
    ("<tool_call>\nno call\n</tool_call>", "`<tool_call>\nno call\n</tool_call>`"),
    ('<tool_call>{"x": 1}</tool_call>', '`<tool_call>{"x": 1}</tool_call>`'),
    ('<tool_call>{"name": "now", "arguments": {"a": oops}} b', '0:now{"a": oops`}} b`'),
    ('<tool_call>{"name": "now", "arguments": [1]} b', "0:now`[1]} b`"),
    ("<tool_call>[]</tool_call>", "`<tool_call>[]</tool_call>`"),
    ("  plain text \n", "`  plain text \n`"),
    ("", ""),
]
LLAMA = [
    ('{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}', CALL),
    ('\n\n{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}', CALL),
    ('<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}', CALL),
    ('{"type": "function", "name": "get_weather", "parameters": {"city": "Paris", "days": 3}}', CALL),
    ('{"function": "get_weather", "parameters": {"city": "Paris", "days": 3}}', CALL),
    ('{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}', "0:now{}.1:now{}."),
    ('{"name": "now", "parameters": {}}\n{"name": "now", "parameters": {}}', "0:now{}.1:now{}."),
    ('<|python_tag|>{"name": "now", "parameters": {}}<|python_tag|>{"name": "now"}', "0:now{}.1:now{}."),
    ('Sure. <|python_tag|>{"name": "now", "parameters": {}}', "`Sure.`0:now{}."),
    ('Sure: {"name": "now", "parameters": {}}', '`Sure: {"name": "now", "parameters": {}}`'),
    ('{"city": "Paris"}', '`{"city": "Paris"}`'),
    ('{"name": "Bob", "age": 3}', '`{"name": "Bob", "age": 3}`'),
    ('{"name": "Bob"}', '`{"name": "Bob"}`'),
    ('{"name": "unknown", "parameters": {}}', "0:unknown{}."),
    ("<|python_tag|>import os", "`<|python_tag|>import os`"),
    ('{"name": "get_weather", "parameters": {"ci', '0:get_weather{"ci'),
    ('{"name": "unknown", "para', '`{"name": "unknown", "para`'),
]
MISTRAL = [
    (f"[TOOL_CALLS] [{WEATHER}]", CALL),
    (f'[TOOL_CALLS][{WEATHER}, {{"name": "now", "arguments": {{}}}}]', CALL + "1:now{}."),
    ('[TOOL_CALLS] [{"name": "now", "arguments": {}, "id": "a1b2c3d4e"}]', "0:now{}."),
    ('[TOOL_CALLS] [{"id": "a1b2c3d4e", "name": "now", "arguments": {}}]', "0:now#a1b2c3d4e{}."),
    ('Hm. [TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 3}', f"`Hm.`{CALL}"),
    ('[TOOL_CALLS]get_weather{"city": "Paris", "days": 3}', CALL),
    ("[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]{}", "0:now{}.1:now{}."),
    ("[TOOL_CALLS]now[CALL_ID]a1b2c3d4e[ARGS]{}", "0:now#a1b2c3d4e{}."),
    ("[TOOL_CALLS]now[ARGS][TOOL_CALLS]now[ARGS]{}", "0:now{}.1:now{}."),
    ('[TOOL_CALLS]поиск-web_2[ARGS]{"ключ": "["}', '0:поиск-web_2{"ключ": "["}.'),
    ("[TOOL_CALLS] none of it", "`[TOOL_CALLS] none of it`"),
    ("[TOOL_CALLS]no", "`[TOOL_CALLS]no`"),
    ('[TOOL_CALLS]now[ARGS]{"a": [1, ', '0:now{"a": [1, '),
    ("see [TOOL] and [1]", "`see [TOOL] and [1]`"),
]
PYTHONIC = [
    (f"[now(a=0x{'f' * 300})]", f'0:now{{"a": 0x{"f" * 300}`)]`'),
    ('[get_weather(city="Paris", days=3), now()]', CALL + "1:now{}."),
    ("<|python_start|>[get_weather(city='Paris', days=3)]<|python_end|>", CALL),
    (
        "[anything(a=True, b=None, c=[1, -2.5, (3,),], d={'k': 'it\\'s', \"m\": {}}, e='x\\ty\"', f=1e3, g=.5)]",
        '0:anything{"a": true, "b": null, "c": [1,-2.5,[3]], "d": {"k":"it\'s","m":{}}, "e": "x\\ty\\"",'
        ' "f": 1e3, "g": 0.5}.',
    ),
    (
        "[anything(a=true, b=null, c='\\u00e9\\x41', d=1_000)]",
        '0:anything{"a": true, "b": null, "c": "\\u00e9A", "d": 1000}.',
    ),
    ('[поиск-web_2(ключ="да")]', '0:поиск-web_2{"ключ": "да"}.'),
    ("[unknown(a=1)]", '0:unknown{"a": 1}.'),
    ("[unknown()]", "0:unknown{}."),
    ("[now( ) , now(\n)]", "0:now{}.1:now{}."),
    ("[now()] and more", "0:now{}.`and more`"),
    ("[link](http://x)", "`[link](http://x)`"),
    ("[see(this)]", "`[see(this)]`"),
    ("[1, 2]", "`[1, 2]`"),
    ("hello", "`hello`"),
    ('[get_weather(city="Par', '0:get_weather{"city": "Par'),
    ("[now(a=b)]", '0:now{"a": b`)]`'),
    ("[now()", "0:now{}."),
]
QWEN = [
    (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
        CALL,
    ),
    (
        "Hm.\n<function=get_weather><parameter=city>Paris</parameter><parameter=days>3</parameter></function> b",
        f"`Hm.`{CALL}`b`",
    ),
    ("<tool_call>\n<function=now>\n</function>\n</tool_call>", "0:now{}."),
    ("<tool_call>\n<function=now>\n</tool_call>", "0:now{}."),
    (
        '<tool_call>\n<function=get_weather>\n<parameter=city>\nA "b"\n\n{c}\n\n</parameter>\n<parameter=spots>\n'
        "[1, 2.5]\n</parameter>\n<parameter=now>\nTrue\n</parameter>\n<parameter=unit>\nC\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        '0:get_weather{"city": "A \\"b\\"\\n\\n{c}\\n", "spots": [1, 2.5], "now": true, "unit": "C"}.1:now{}.',
    ),
    ("<function=get_weather><parameter=days>three</parameter></function>", '0:get_weather{"days": "three"}.'),
    ("<function=get_weather><parameter=other>3</parameter></function>", '0:get_weather{"other": "3"}.'),
    ("<function=unknown><parameter=a>1</parameter></function>", '0:unknown{"a": "1"}.'),
    ("<function=поиск-web_2><parameter=ключ>да</parameter></function>", '0:поиск-web_2{"ключ": "да"}.'),
    ("<function=get_weather><parameter=city>Par", '0:get_weather{"city": "Par'),
    ("<function=get_weather><parameter=city>\n\n</parameter></function>", '0:get_weather{"city": ""}.'),
    ("<tool_call>\nno\n</tool_call>", "`<tool_call>\nno\n</tool_call>`"),
    ("<function=get_wea", "`<function=get_wea`"),
    ("<function=now>oops</function>", "0:now`oops</function>`"),
]
V3 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
DEEPSEEK = [
    (
        V3 + 'get_weather\n```json\n{"city": "Paris", "days": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        CALL,
    ),
    (
        "Hm." + V3 + 'get_weather\n```json\n{"city": "Paris", "days": 3}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        f"`Hm.`{CALL}1:now{{}}.",
    ),
    (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris", "days": 3}'
        "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        CALL + "1:now{}.",
    ),
    (V3 + "now\n```json\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "0:now{}."),
    (V3 + 'now\n```json\n{"a": "```', '0:now{"a": "```'),
    (V3 + "no", "`" + V3 + "no`"),
    ("<｜tool▁calls▁begin｜>x", "`<｜tool▁calls▁begin｜>x`"),
    ("<｜tool▁", "`<｜tool▁`"),
]
ASK = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
HARMONY = [
    ("<|channel|>final<|message|>Hello.<|return|>", "`Hello.`"),
    ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello.", "~Hm.~`Hello.`"),
    (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" + ASK + '{"city": "Paris", "days": 3}<|call|>',
        f"~Hm.~{CALL}",
    ),
    (
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.now<|channel|>commentary json"
        "<|message|>{}<|call|>",
        "`I look.`0:now{}.",
    ),
    (" to=functions.now<|channel|>commentary<|message|>{}", "0:now{}."),
    ("<|channel|>analysis to=functions.now code<|message|>{}<|call|>", "0:now{}."),
    (ASK + "<|call|>", "0:get_weather{}."),
    (ASK + '{"city": "<|call', '0:get_weather{"city": "<|call'),
    (ASK + "oops<|call|>", "`oops`"),
    ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b", "~a\n\nb~"),
    ("<|channel|>comm", ""),
    ("plain", "`plain`"),
]
JSON = [
    (WEATHER, CALL),
    (f"```json\n{WEATHER}\n```", CALL),
    (f'```\n[{WEATHER}, {{"name": "now"}}]\n```\n', CALL + "1:now{}."),
    ('{"arguments": {"x": 1}, "name": "unknown"}', '0:unknown{"x": 1}.'),
    ('{"name": "Bob", "age": 3}', '`{"name": "Bob", "age": 3}`'),
    ('```json\n{"city": 1}\n```', '````json\n{"city": 1}\n```' + "`"),
    ("```python\nx\n```", "```python\nx\n```".join("``")),
    ("[1, 2]", "`[1, 2]`"),
    (f"So: {WEATHER}", f"`So: {WEATHER}`"),
    (f"{WEATHER} done", f"{CALL}`done`"),
]
FORMATS = {
    "hermes": HERMES,
    "llama3_json": LLAMA,
    "mistral": MISTRAL,
    "pythonic": PYTHONIC,
    "qwen3_coder": QWEN,
    "deepseek_v3": DEEPSEEK,
    "openai": HARMONY,
    "json": JSON,
}
CASES = [(name, text, expected) for name, cases in FORMATS.items() for text, expected in cases]


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_a_text_is_read_the_same_whole_and_in_pieces(name: str, text: str, expected: str):
    """The events of a text as a model writes it, however it is cut."""
    for pieces in ways(text):
        assert told(run(machine_of(name), pieces)) == expected


THOUGHTS = [
    ("qwen3", False, "<think>\nHm.\n</think>\n\nHi", "~Hm.~`Hi`"),
    ("qwen3", True, "Hm.\n</think>\n\nHi", "~Hm.~`Hi`"),
    ("qwen3", False, "Hi <think>a</think>", "`Hi <think>a</think>`"),
    ("qwen3", False, "<think>\n\n</think>\n\nHi", "`Hi`"),
    ("qwen3", False, "\n<think>a</thi", "~a</thi~"),
    ("qwen3", False, "<thin", "`<thin`"),
    ("deepseek_r1", True, "Hm.</think>Hi", "~Hm.~`Hi`"),
    ("deepseek_r1", True, "<think>\nHm.\n</think>\n\nHi </think>", "~Hm.~`Hi </think>`"),
    (
        "openai_gptoss",
        False,
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b",
        "~a~`b`",
    ),
    ("openai_gptoss", True, "a<|end|><|start|>assistant<|channel|>final<|message|>b", "~a~`b`"),
    ("openai_gptoss", False, ASK + "{}<|call|>", "`{}`"),
]


@pytest.mark.parametrize(("name", "opened", "text", "expected"), THOUGHTS)
def test_thought_is_told_from_answer(name: str, opened: bool, text: str, expected: str):
    """Reasoning alone, with its block opened by the prompt or by the answer."""
    for pieces in ways(text):
        assert told(run(machine_of(None, name, opened=opened), pieces)) == expected


BOTH = [
    (
        "hermes",
        "qwen3",
        False,
        f"<think>\n<tool_call>?\n</think>\n\n<tool_call>\n{WEATHER}\n</tool_call>",
        "~<tool_call>?~" + CALL,
    ),
    ("deepseek_v3", "deepseek_r1", True, "a</think>b" + V3 + "now\n```json\n{}\n```", "~a~`b`0:now{}."),
    ("openai", "openai_gptoss", True, "a<|end|><|start|>assistant" + ASK + "{}<|call|>", "~a~0:get_weather{}."),
    (None, None, False, f"<think> <tool_call>\n{WEATHER}", f"`<think> <tool_call>\n{WEATHER}`"),
]


@pytest.mark.parametrize(("tool", "reasoning", "opened", "text", "expected"), BOTH)
def test_calls_are_looked_for_after_the_thought(tool: str, reasoning: str, opened: bool, text: str, expected: str):
    """Reasoning first, and calls in what follows it."""
    for pieces in ways(text):
        assert told(run(machine_of(tool, reasoning, opened=opened), pieces)) == expected


ARRIVING = [
    ("hermes", "Hm.", "`Hm.`"),
    ("hermes", "Hm. <tool_", "`Hm.`"),
    ("hermes", '<tool_call>\n{"name": "get_weather"', "0:get_weather"),
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par', '0:get_weather{"city": "Par'),
    ("hermes", '<tool_call>\n{"name": "now", "arguments": {}}', "0:now{}."),
    ("llama3_json", '{"name": "now"', "0:now"),
    ("llama3_json", '{"name": "unknown"', ""),
    ("llama3_json", '{"name": "unknown", "parameters": {', "0:unknown{"),
    ("llama3_json", '{"city"', '`{"city"`'),
    ("mistral", "[TOOL_CALLS]now[ARGS]", "0:now"),
    ("pythonic", "[now(", "0:now"),
    ("pythonic", '[get_weather(city="Par', '0:get_weather{"city": "Par'),
    ("qwen3_coder", "<tool_call>\n<function=now>", "0:now"),
    ("qwen3_coder", "<function=get_weather><parameter=city>Par", '0:get_weather{"city": "Par'),
    ("deepseek_v3", V3 + "now\n", "0:now"),
    ("openai", ASK + '{"city', '0:get_weather{"city'),
    ("openai", "<|channel|>analysis<|message|>Hm", "~Hm~"),
    ("json", '{"name": "now"', "0:now"),
]


@pytest.mark.parametrize(("name", "text", "expected"), ARRIVING)
def test_what_is_certain_is_told_at_once(name: str, text: str, expected: str):
    """Before the text has ended: names when they are complete, arguments and content as they come."""
    made = machine_of(name)
    assert told([event for char in text for event in made.feed(char)]).replace("``", "").replace("~~", "") == expected
