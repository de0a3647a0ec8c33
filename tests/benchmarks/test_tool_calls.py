"""The check of tool calls: questions as requests, answers whole and streamed, what is at fault in them."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from benchmarks.tool_calls import CATEGORIES, Verdict, as_json_schema, check, questions_of

LINE = {
    "id": "q",
    "question": [[{"role": "user", "content": "Two and two?"}]],
    "function": [
        {
            "name": "math.add",
            "description": "adds",
            "parameters": {"type": "dict", "properties": {"x": {"type": "float"}}, "required": ["x"]},
        }
    ],
}


def _call(arguments: str, name: str = "math_add") -> dict[str, object]:
    return {"index": 0, "id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


def _more(arguments: str) -> dict[str, object]:
    return {"index": 0, "function": {"arguments": arguments}}


def _verdict(tmp_path: Path, call: dict[str, object], finish_reason: str, pieces: Sequence[object]) -> Verdict:
    """Of a server that answers with this call, and these pieces where it streams."""
    for category in CATEGORIES:
        (tmp_path / f"BFCL_v4_{category}.json").write_text(json.dumps(LINE))

    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        assert body["tool_choice"] == "required"
        assert body["tools"][0]["function"]["parameters"]["properties"] == {"x": {"type": "number"}}
        if not body.get("stream"):
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
            return httpx.Response(200, json={"choices": [{"message": message, "finish_reason": finish_reason}]})
        choices = [{"delta": {"tool_calls": [piece]}, "finish_reason": None} for piece in pieces]
        choices.append({"delta": {}, "finish_reason": finish_reason})
        events = [json.dumps({"choices": [choice]}) for choice in choices]
        return httpx.Response(200, text="".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]))

    async def checked() -> Verdict:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://server") as http:
            return await check(http, "model", questions_of(tmp_path, 4)[0], asyncio.Semaphore(1))

    return asyncio.run(checked())


def test_the_same_call_whole_and_in_pieces_is_no_fault(tmp_path: Path):
    pieces = [_call(""), _more('{"x"'), _more(": 4}")]
    assert _verdict(tmp_path, _call('{"x": 4}'), "tool_calls", pieces) == Verdict("q", 1, False, [])


def test_only_an_answer_cut_by_length_may_hold_half_a_call(tmp_path: Path):
    pieces = [_call('{"x"')]
    assert _verdict(tmp_path, _call('{"x"'), "length", pieces) == Verdict("q", 0, True, [])
    assert "not JSON" in _verdict(tmp_path, _call('{"x"'), "tool_calls", pieces).faults[0]


@pytest.mark.parametrize(
    ("call", "finish_reason", "pieces", "fault"),
    [
        (_call('{"x": "4"}'), "tool_calls", [_call('{"x": "4"}')], "is not of type 'number'"),
        (_call('{"x": 4}', "other"), "tool_calls", [_call('{"x": 4}', "other")], "no such tool"),
        (_call('{"x": 4}'), "stop", [_call('{"x": 4}')], "finish_reason 'stop'"),
        (_call('{"x": 4}'), "tool_calls", [_call('{"x": 5}')], "streamed"),
        (_call('{"x": 4}'), "tool_calls", [_call('{"x"'), _call(": 4}")], "no piece of a call"),
        (_call('{"x": 4}'), "tool_calls", [_more('{"x": 4}')], "no piece of a call"),
    ],
)
def test_faults(
    tmp_path: Path, call: dict[str, object], finish_reason: str, pieces: Sequence[object], fault: str
) -> None:
    assert fault in _verdict(tmp_path, call, finish_reason, pieces).faults[0]


def test_types_of_the_leaderboard_become_those_of_json_schema():
    inner = {"a": {"type": "tuple", "items": {"type": "any"}}, "type": {"type": "string"}}
    found = as_json_schema({"type": "dict", "properties": inner, "required": ["a"]})
    wanted = {"a": {"type": "array", "items": {}}, "type": {"type": "string"}}
    assert found == {"type": "object", "properties": wanted, "required": ["a"]}
