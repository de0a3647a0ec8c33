"""Events of a stream to an answer: what counts as text, what counts tokens, and every way to fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import pytest

from server.bench.answers import Answer, Sample
from server.bench.client import Client
from server.bench.endpoint import Endpoint, Events
from server.bench.vocabulary import WordVocabulary
from tests.server.bench.replay import events, replaying

TEXT = '{"choices":[{"text":"ab","finish_reason":null}]}'
NO_TEXT = '{"choices":[{"text":"","finish_reason":null}]}'
END = '{"choices":[{"text":"","finish_reason":"length"}]}'
USAGE = '{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":5,"total_tokens":12}}'
ERROR = '{"error":{"message":"the engine is gone","type":"server_error","code":"engine_dead"}}'


def ask(answer: Sequence[bytes], *, chat: bool = False, counting: WordVocabulary | None = None) -> tuple[Answer, bytes]:
    async def asking() -> tuple[Answer, bytes]:
        async with replaying(answer, close=True) as (url, replay):
            client = Client(url, {})
            endpoint = Endpoint(client, "/v1/x", chat, "toy", {"temperature": 0.0, "ignore_eos": True}, counting)
            found = await endpoint.ask(Sample("say it", 3, 9))
            client.close()
            return found, replay.requests[0].partition(b"\r\n\r\n")[2]

    return asyncio.run(asking())


def test_tokens_are_those_of_the_usage_and_arrivals_those_of_text():
    found, _ = ask(events(NO_TEXT, TEXT, TEXT, END, USAGE, "[DONE]"))
    assert (found.error, found.text, found.prompt_tokens, found.output_tokens) == ("", "abab", 7, 5)
    assert len(found.arrivals) == 2
    assert found.start < found.arrivals[0] < found.arrivals[1] <= found.end


def test_an_answer_without_text_has_a_first_token_all_the_same():
    found, _ = ask(events(END, USAGE, "[DONE]"))
    assert (found.error, found.arrivals) == ("", (found.end,))


def test_what_is_asked():
    _, body = ask(events(TEXT, END, USAGE))
    common = {
        "model": "toy",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "ignore_eos": True,
    }
    assert json.loads(body) == {**common, "prompt": "say it", "max_tokens": 9}
    _, body = ask(events(TEXT, END, USAGE), chat=True)
    messages = [{"role": "user", "content": "say it"}]
    assert json.loads(body) == {**common, "messages": messages, "max_completion_tokens": 9}


@pytest.mark.parametrize(
    ("delta", "text"),
    [
        ('{"role":"assistant","content":""}', None),
        ('{"content":"hi"}', "hi"),
        ('{"reasoning":"hm"}', "hm"),
        ('{"reasoning_content":"hm"}', "hm"),
        ('{"tool_calls":[{"index":0,"function":{"name":"f","arguments":"{"}}]}', "f{"),
        ("null", None),
    ],
)
def test_deltas_that_bring_something(delta: str, text: str | None):
    found = Events()
    found.feed(f'data: {{"choices":[{{"delta":{delta}}}]}}\n\n'.encode(), 1.0)
    assert (found.texts, found.arrivals, found.last) == ([text] if text else [], [1.0] if text else [], 1.0)


@pytest.mark.parametrize("size", [1, 3, 50])
def test_events_may_be_cut_anywhere(size: int):
    data = f": comment\r\n\r\ndata:{TEXT}\r\n\r\ndata: {USAGE}\n\ndata: [DONE]\n\n".encode()
    found = Events()
    for at in range(0, len(data), size):
        found.feed(data[at : at + size], 0.0)
    assert (found.texts, found.ended, found.error) == (["ab"], True, "")
    assert found.usage is not None and found.usage.completion_tokens == 5


REFUSAL = b'HTTP/1.1 404 Not Found\r\nContent-Length: 42\r\n\r\n{"error":{"message":"no such model \'toy\'"}}'.replace(
    b"42", b"43"
)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ([REFUSAL], "status 404: no such model 'toy'"),
        ([b"HTTP/1.1 502 Bad\r\nContent-Length: 4\r\n\r\nnope"], "status 502"),
        (events(TEXT, ERROR, "[DONE]"), "the server sent an error: the engine is gone"),
        (events(TEXT, USAGE), "the stream ended before the answer did"),
        (events("[DONE]"), "the stream ended before the answer did"),
        (events(TEXT, end=False), "the connection broke off in the middle of an answer (no last chunk; closed)"),
        (events(TEXT, END, "[DONE]"), "the server tells no usage; name a tokenizer that counts with --tokenizer"),
        (
            events('{"choices":3}'),
            "an event is not what OpenAI's API has: Expected `array | null`, got `int` - at `$.choices`",
        ),
    ],
)
def test_failures_are_named(answer: Sequence[bytes], told: str):
    found, _ = ask(answer)
    assert found.error == told


def test_a_tokenizer_counts_where_the_server_does_not():
    found, _ = ask(events('{"choices":[{"text":"one two "}]}', END, "[DONE]"), counting=WordVocabulary())
    assert (found.error, found.prompt_tokens, found.output_tokens) == ("", 3, 2)
