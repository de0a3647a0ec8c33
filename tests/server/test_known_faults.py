"""Faults that users of such servers have reported, each tried again: the symptom is in the test's name."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.server.conftest import client_of, make_service
from tests.server.fake_engine import BOS, VOCAB, FakeEngine, wait_for
from tests.server.test_errors import CHAT, COMPLETIONS, HELLO, error_of
from tests.server.test_tools import CALL, CALL_NOW, TOOLS, assembled, comparable

GREEDY = {"prompt": "a", "temperature": 0}
JSON = {"content-type": "application/json"}


async def still_serves(client: httpx.AsyncClient) -> None:
    answer = await client.post(COMPLETIONS, json=GREEDY | {"max_tokens": 3})
    assert answer.json()["choices"][0]["text"] == "bcd"


@pytest.mark.anyio
@pytest.mark.parametrize("bias", [{"99999999": 1}, {"AI": -100}, {"-1": 1}, {str(VOCAB): 1}, {"1.5": 1}, {"": 1}])
async def test_a_bias_for_a_token_that_is_not_there_kills_the_engine(client, bias: dict[str, float]) -> None:
    for path, prompt in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HELLO})):
        error = error_of(await client.post(path, json=prompt | {"logit_bias": bias}), 400)
        assert error["param"] == "logit_bias"
    assert (await client.post(COMPLETIONS, json=GREEDY | {"logit_bias": {}})).status_code == 200
    await still_serves(client)


@pytest.mark.anyio
async def test_a_seed_of_more_than_64_bits_kills_the_worker(client) -> None:
    for seed in (2**63, 2**64, -(2**63) - 1, 10**30, "100", 1.5, True):
        assert error_of(await client.post(COMPLETIONS, json=GREEDY | {"seed": seed}), 400)["param"] == "seed"
    for seed in (0, -1, 2**63 - 1, -(2**63)):
        assert (await client.post(COMPLETIONS, json=GREEDY | {"seed": seed})).status_code == 200
    await still_serves(client)


@pytest.mark.anyio
async def test_a_top_k_that_is_no_count_kills_the_server(client, engine: FakeEngine) -> None:
    for top_k in (0.01, 0.5, -5, "x"):
        assert error_of(await client.post(COMPLETIONS, json=GREEDY | {"top_k": top_k}), 400)["param"] == "top_k"
    for top_k in (0, -1, 10**7, 10**30):
        assert (await client.post(COMPLETIONS, json=GREEDY | {"top_k": top_k})).status_code == 200
    assert [params.top_k for params in engine.params] == [0] * 4, "all of them are off"


@pytest.mark.anyio
async def test_a_repetition_penalty_of_zero_divides_by_zero(client) -> None:
    for penalty in (0, 0.0, -1, "x"):
        error = error_of(await client.post(COMPLETIONS, json=GREEDY | {"repetition_penalty": penalty}), 400)
        assert error["param"] == "repetition_penalty"
    await still_serves(client)


class Worst:
    """How long the slowest of something took."""

    seconds = 0.0


def answers_within_a_second(attack: Callable[[], Worst]) -> bool:
    """Whether a page did while it was attacked. Tried three times, since a busy machine may stand still by itself."""
    return any(attack().seconds < max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)) for _ in range(3))


@contextlib.contextmanager
def watched(url: str, path: str = "/health") -> Iterator[Worst]:
    """Asks a page all the time."""
    worst, done = Worst(), threading.Event()

    def poll() -> None:
        with httpx.Client(base_url=url, timeout=30) as client:
            while not done.wait(0.02):
                began = time.monotonic()
                assert client.get(path).status_code == 200
                worst.seconds = max(worst.seconds, time.monotonic() - began)

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(poll)
        try:
            yield worst
        finally:
            done.set()
            asked.result()


LARGE: list[tuple[str, Callable[[], bytes]]] = [
    (COMPLETIONS, lambda: json.dumps({"prompt": "word " * 4_000_000}).encode()),
    (COMPLETIONS, lambda: b'{"prompt": [' + b"1," * 15_000_000 + b"1]}"),
    (COMPLETIONS, lambda: b'{"prompt": [' + b"1," * 1_900_000 + b"1]}"),
    (COMPLETIONS, lambda: b'{"prompt": [' + b"[]," * 9_000_000 + b"[]]}"),
    (COMPLETIONS, lambda: b'{"prompt": [' + b"[1]," * 240_000 + b"[1]]}"),
    (COMPLETIONS, lambda: b'{"prompt": [' + b'"",' * 1_900_000 + b'""]}'),
    (CHAT, lambda: json.dumps({"messages": [{"role": "user", "content": "word " * 4_000_000}]}).encode()),
    (CHAT, lambda: b'{"messages": [' + b'{"role":"user","content":""},' * 240_000 + b"7]}"),
    (CHAT, lambda: b'{"messages": [' + b'{"role":"king","content":""},' * 240_000 + b'{"role":"user"}]}'),
    (CHAT, lambda: b'{"messages": [], "zzz": [' + b"{}," * 240_000 + b"{}]}"),
    ("/detokenize", lambda: b'{"tokens": [' + b"999," * 1_900_000 + b"1]}"),
]


@pytest.mark.parametrize(("path", "make"), LARGE, ids=[str(i) for i in range(len(LARGE))])
def test_a_large_body_holds_up_everybody_else(live, path: str, make: Callable[[], bytes]) -> None:
    server = live(make_service(FakeEngine(delay=0.01)))
    body = make()

    def attack() -> Worst:
        with watched(server.url) as health, ThreadPoolExecutor(1) as pool:
            asked = pool.submit(httpx.post, server.url + path, content=body, headers=JSON, timeout=60)
            stream = httpx.post(f"{server.url}/v1/completions", json=GREEDY | {"max_tokens": 50, "stream": True})
            answer = asked.result()
        assert answer.status_code in (400, 413)
        assert len(answer.content) < 10_000
        assert stream.text.count('"finish_reason":"length"') == 1
        return health

    assert answers_within_a_second(attack)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [{"kind": "wrong " * 10}] * 3000}]}),
        (CHAT, {"messages": ["wrong"] * 3000}),
        (CHAT, {"messages": HELLO, "tools": [7] * 3000}),
        (COMPLETIONS, {"prompt": [{"wrong": "x" * 100}] * 3000}),
        (COMPLETIONS, {"prompt": "x", "stop": [None] * 3000}),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"wrong" * 1000: 1}}),
        (COMPLETIONS, {"prompt": "x", "x" * 100_000: 1, "temperature": "x" * 100_000}),
        ("/detokenize", {"tokens": ["wrong"] * 3000}),
    ],
    ids=range(8),
)
async def test_many_wrong_items_become_a_huge_error(client, path: str, body: dict[str, object]) -> None:
    answer = await client.post(path, json=body)
    assert answer.status_code == 400
    assert len(answer.content) < 5000


SURROGATE = '"x \\ud83d"'


@pytest.mark.anyio
@pytest.mark.parametrize("stream", ["true", "false"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, f'"prompt": {SURROGATE}'),
        (COMPLETIONS, f'"prompt": "x", "stop": {SURROGATE}'),
        (COMPLETIONS, f'"prompt": "x", "stop": ["a", {SURROGATE}]'),
        (COMPLETIONS, f'"prompt": "x", "model": {SURROGATE}'),
        (COMPLETIONS, f'"prompt": "x", "user": {SURROGATE}'),
        (COMPLETIONS, f'"prompt": "x", "request_id": {SURROGATE}'),
        (COMPLETIONS, f'"prompt": "x", "logit_bias": {{{SURROGATE}: 1}}'),
        (COMPLETIONS, f'"prompt": "x", {SURROGATE}: 1'),
        (CHAT, f'"messages": [{{"role": "user", "content": {SURROGATE}}}]'),
        (CHAT, f'"messages": [{{"role": {SURROGATE}, "content": "x"}}]'),
        (CHAT, f'"messages": [{{"role": "user", "content": [{{"type": "text", "text": {SURROGATE}}}]}}]'),
        (CHAT, f'"messages": [], "tools": [{{"type": "function", "function": {{"name": {SURROGATE}}}}}]'),
        (CHAT, f'"messages": [], "chat_template_kwargs": {{"a": {SURROGATE}}}'),
        ("/tokenize", f'"prompt": {SURROGATE}'),
    ],
)
async def test_half_a_surrogate_pair_is_a_500(client, path: str, body: str, stream: str) -> None:
    answer = await client.post(path, content=f'{{{body}, "stream": {stream}}}'.encode(), headers=JSON)
    message = error_of(answer, 400)["message"]
    assert "surrogate" in message
    assert "Error" not in message and "codec" not in message
    await still_serves(client)


def test_two_live_requests_of_one_name_cross_their_answers(live) -> None:
    server = live(make_service(FakeEngine(delay=0.002)))
    letters = {"a": "bcdefghij", "h": "ijklmnopq", "p": "qrstuvwxy", "s": "tuvwxyzab"}

    def ask(letter: str, stream: bool) -> str:
        body = {"prompt": letter, "max_tokens": 9, "temperature": 0, "request_id": "same", "stream": stream}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers={"X-Request-Id": "same-id"}, timeout=10)
        assert answer.headers["x-request-id"] == "same-id"
        lines = answer.text.removesuffix("data: [DONE]\n\n").split("\n\n") if stream else [answer.text]
        found = [json.loads(line.removeprefix("data: ")) for line in lines if line]
        assert {one["id"] for one in found} == {"cmpl-same"}
        return "".join(one["choices"][0]["text"] for one in found)

    with ThreadPoolExecutor(8) as pool:
        asked = {(letter, stream): pool.submit(ask, letter, stream) for letter in letters for stream in (True, False)}
        for (letter, _), future in asked.items():
            assert future.result() == letters[letter]


@pytest.mark.anyio
@pytest.mark.parametrize("name", [b"x" * 10_000, b"a\tb", b"a\x7fb", "ключ".encode(), b"\x1b[31mred", b""])
async def test_a_hostile_id_is_repeated(client, name: bytes) -> None:
    answer = await client.post(COMPLETIONS, json=GREEDY, headers={"X-Request-Id": name})
    told = answer.headers["x-request-id"]
    assert len(told) == 32 and told.isalnum()
    assert answer.json()["id"] == f"cmpl-{told}"


def resident() -> int:
    """Bytes, at their highest."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def test_a_client_that_does_not_read_costs_memory_and_delays_others(live) -> None:
    engine = FakeEngine(max_model_len=2000)
    server = live(make_service(engine))
    asked = {"prompt": "a", "max_tokens": 600, "temperature": 0, "stream": True, "logprobs": 5}
    expected = httpx.post(f"{server.url}/v1/completions", json=asked | {"stream": False}, timeout=30).json()
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    before = resident()
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(socket.socket()) for _ in range(8)]
        for peer in peers:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            peer.connect(("127.0.0.1", server.port))
            peer.sendall(head.encode() + body)
        wait_for(lambda: engine.tokens_made > 1000)
        began = time.monotonic()
        other = httpx.post(f"{server.url}/v1/completions", json=GREEDY | {"max_tokens": 20}, timeout=10)
        assert other.json()["choices"][0]["text"] == "bcdefghijklmnopqrstu"
        assert time.monotonic() - began < 5
        assert resident() - before < 64 * 1024 * 1024
        for peer in peers:
            peer.settimeout(20)
            data = b"".join(iter(lambda peer=peer: peer.recv(65536), b""))
            assert text_of(data) == expected["choices"][0]["text"]
    wait_for(lambda: not engine.running)


def text_of(raw: bytes) -> str:
    """The text of a stream of chunked HTTP."""
    assert b"data: [DONE]" in raw
    events = [line[6:] for line in raw.split(b"\n") if line.startswith(b"data: {")]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def test_thousands_of_prompts_at_once_stall_the_server(live) -> None:
    engine = FakeEngine()
    server = live(make_service(engine))
    with httpx.Client(base_url=server.url, timeout=60) as client:
        assert error_of(client.post(COMPLETIONS, json={"prompt": ["x"] * 3000}), 400)["param"] == "prompt"
        for n in (1_000_000, 10**30, 129):
            assert error_of(client.post(COMPLETIONS, json=GREEDY | {"n": n}), 400)["param"] == "n"
        assert not engine.seen

    def attack() -> Worst:
        prompts = ["abcdefghij"[i % 10] for i in range(1000)]
        asked = {"prompt": prompts, "temperature": 0, "max_tokens": 2}
        with watched(server.url) as health:
            found = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60).json()
        assert [choice["index"] for choice in found["choices"]] == list(range(1000))
        assert all(c["text"][0] == chr(ord(p) + 1) for c, p in zip(found["choices"], prompts, strict=True))
        return health

    assert answers_within_a_second(attack)


async def chunks(client: httpx.AsyncClient, path: str, body: dict[str, object]) -> list[dict]:
    """The records of a stream, whose bytes are checked: one line an event, `[DONE]` at the end, nothing else."""
    raw = (await client.post(path, json=body | {"stream": True})).content.decode()
    assert raw.endswith("\n\n")
    *events, done = raw.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    assert all(event.startswith("data: {") and "\n" not in event for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


STREAMS = [
    (COMPLETIONS, {"prompt": "a", "temperature": 0, "max_tokens": 6}),
    (COMPLETIONS, {"prompt": ["a", "b"], "temperature": 1, "n": 2, "max_tokens": 6, "seed": 1}),
    (CHAT, {"messages": HELLO, "temperature": 0, "max_tokens": 6}),
    (CHAT, {"messages": HELLO, "temperature": 1, "n": 2, "max_tokens": 6, "seed": 1}),
]


@pytest.mark.anyio
@pytest.mark.parametrize(("path", "body"), STREAMS)
async def test_usage_is_missing_or_in_the_wrong_chunk_of_a_stream(client, path: str, body: dict[str, object]) -> None:
    whole = (await client.post(path, json=body)).json()["usage"]
    found = await chunks(client, path, body | {"stream_options": {"include_usage": True}})
    assert found[-1]["choices"] == []
    assert found[-1]["usage"] == whole
    assert all(one["choices"] and one["usage"] is None for one in found[:-1])
    assert all("usage" not in one for one in await chunks(client, path, body))


@pytest.mark.anyio
@pytest.mark.parametrize(("path", "body"), STREAMS)
async def test_a_stream_has_no_end_or_two_of_them(client, path: str, body: dict[str, object]) -> None:
    found = await chunks(client, path, body)
    assert len({(one["id"], one["created"], one["model"], one["object"]) for one in found}) == 1
    reasons: dict[int, list[str | None]] = {}
    for one in found:
        for choice in one["choices"]:
            reasons.setdefault(choice["index"], []).append(choice["finish_reason"])
    assert sorted(reasons) == list(range(len((await client.post(path, json=body)).json()["choices"])))
    for told in reasons.values():
        assert told[-1] == "length"
        assert set(told[:-1]) <= {None}


OTHER_SPELLINGS = [
    "/v1/completions", "//v1/completions", "/v1//completions", "/V1/completions", "/v1/completions/",
    "/v1/%63ompletions", "/%2Fv1/completions", "/v1%2Fcompletions", "/./v1/completions", "/health/../v1/completions",
    "/health/", "//health", "/HEALTH", "/metrics/", "/v1/messages", "/v1/responses", "/v2/embed", "/invocations",
    "/tokenize", "/detokenize", "/v1/load_lora_adapter", "/openapi.json", "/docs", "/load", "/version", "/v1/models",
    "/",
]  # fmt: skip


def status_of(port: int, request: bytes) -> int:
    """The answer to a request that is sent as it is, without a client that tidies it."""
    with socket.create_connection(("127.0.0.1", port), 10) as peer:
        peer.sendall(request)
        return int(peer.recv(100).split()[1])


def test_the_key_is_asked_for_by_the_spelling_of_the_path(live) -> None:
    server = live(make_service(FakeEngine(), api_key=("schlüssel",), enable_server_load_tracking=True))

    def asks(path: str, key: str = "") -> int:
        line = f"Authorization: {key}\r\n" if key else ""
        return status_of(server.port, f"GET {path} HTTP/1.1\r\nHost: x\r\n{line}\r\n".encode())

    assert {path: asks(path) for path in OTHER_SPELLINGS} == dict.fromkeys(OTHER_SPELLINGS, 401)
    assert [asks(path) for path in ("/health", "/ping", "/metrics")] == [200] * 3
    for key, status in {
        "bearer schlüssel": 200,
        "BEARER schlüssel": 200,
        "Bearer schlüsse": 401,
        "Bearer schlüssell": 401,
        "Bearer schlussel": 401,
        "schlüssel": 401,
    }.items():
        assert asks("/v1/models", key) == status, key


@pytest.mark.anyio
async def test_a_browsers_preflight_is_refused_where_a_key_is_set() -> None:
    async with client_of(make_service(FakeEngine(), api_key=("key",), allowed_origins=("*",))) as client:
        asked = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
        leave = await client.options(CHAT, headers=asked)
        assert leave.status_code == 200
        assert leave.headers["access-control-allow-origin"] == "*"
        refused = await client.post(CHAT, json={"messages": HELLO}, headers={"Origin": "https://page.example"})
        assert error_of(refused, 401)["code"] == "invalid_api_key"
        assert refused.headers["access-control-allow-origin"] == "*"


@pytest.mark.anyio
async def test_nested_brackets_crash_the_server(client) -> None:
    for deep in (b"[" * 50_000, b"[" * 50_000 + b"]" * 50_000, b'{"a":' * 50_000 + b"1" + b"}" * 50_000):
        for body in (deep, b'{"prompt": ' + deep + b"}", b'{"prompt": "x", "other": ' + deep + b"}"):
            error_of(await client.post(COMPLETIONS, content=body, headers=JSON), 400)
        body = b'{"messages": [{"role":"user","content":"x"}], "chat_template_kwargs": {"a": ' + deep + b"}}"
        error_of(await client.post(CHAT, content=body, headers=JSON), 400)
    await asyncio.gather(*(still_serves(client) for _ in range(3)))


async def heard(client: httpx.AsyncClient, path: str, body: dict[str, object]) -> list[tuple[str, str, dict]]:
    """Text, finish_reason and usage of the answer: whole, and as a stream."""
    whole = (await client.post(path, json=body)).json()
    [choice] = whole["choices"]
    said = choice["text"] if path == COMPLETIONS else choice["message"]["content"] or ""
    pieces = await chunks(client, path, body | {"stream_options": {"include_usage": True}})
    text, ends = "", []
    for one in (choice for piece in pieces for choice in piece["choices"]):
        text += one["text"] if path == COMPLETIONS else one["delta"].get("content") or ""
        ends += [one["finish_reason"]] if one["finish_reason"] else []
    assert len(ends) == 1
    return [(said, choice["finish_reason"], whole["usage"]), (text, ends[0], pieces[-1]["usage"])]


@pytest.mark.anyio
@pytest.mark.parametrize("tools", [{}, {"tools": TOOLS}], ids=["plain", "tools"])
@pytest.mark.parametrize(
    ("script", "limit", "stop", "said", "reason"),
    [
        ("abcdef", 6, ["def☃"], "abcdef", "length"),
        ("abcdef", 9, ["def☃"], "abcdef", "stop"),
        ("ab<tool_ca", 10, ["zz"], "ab<tool_ca", "length"),
        ("ab<tool_ca", 20, ["a☃"], "ab<tool_ca", "stop"),
        ("ab<tool_ca", 10, ["_ca☃"], "ab<tool_ca", "length"),
        ("ab é", 4, ["b \ufffd☃"], "ab \ufffd", "length"),
        ("abcdef", 9, ["def"], "abc", "stop"),
    ],
)
async def test_text_that_is_held_back_is_lost_at_the_end(
    client, engine: FakeEngine, script: str, limit: int, stop: list[str], said: str, reason: str, tools: dict
) -> None:
    engine.tokenizer.template = "{{ messages }}{{ tools }}<tool_call>"
    engine.script = script
    asked = {"temperature": 0, "max_tokens": limit, "stop": stop}
    found = await heard(client, CHAT, {"messages": HELLO, **asked, **tools})
    if not tools:
        found += await heard(client, COMPLETIONS, {"prompt": "x", **asked})
    assert {(text, end) for text, end, _ in found} == {(said, reason)}
    assert len({usage["completion_tokens"] for _, _, usage in found}) == 1


@pytest.mark.anyio
async def test_the_bytes_of_alternatives_are_those_of_a_replacement_character(client) -> None:
    """After "!" comes half a character; where something else is chosen, that half is the best alternative."""
    chat = {"messages": HELLO, "max_tokens": 3, "logprobs": True, "top_logprobs": 3, "temperature": 0}
    for bias in ({}, {str(ord("q")): 100}):
        body = chat | {"chat_template_kwargs": {"opening": "!"}, "logit_bias": bias}
        [choice] = (await client.post(CHAT, json=body)).json()["choices"]
        content = choice["logprobs"]["content"]
        assert bytes(b for one in content for b in one["bytes"]).decode() == choice["message"]["content"]
        assert (content[0]["top_logprobs"][0]["token"], content[0]["top_logprobs"][0]["bytes"]) == (
            "bytes:\\xc3",
            [195],
        )
        for one in (top for entry in content for top in entry["top_logprobs"]):
            assert one["bytes"] != list("\ufffd".encode()) and one["token"]
            assert one["token"] in ("bytes:\\xc3", "bytes:\\xa9") or one["token"].encode() == bytes(one["bytes"])


@pytest.mark.anyio
async def test_a_special_token_among_the_alternatives_is_a_500(client) -> None:
    """After "." the end is the likeliest: chosen, passed over, and as an alternative."""
    for more in ({}, {"ignore_eos": True}, {"logit_bias": {str(ord("q")): 100}}):
        body = {"temperature": 0, "max_tokens": 1, **more}
        answer = await client.post(COMPLETIONS, json=body | {"prompt": "a.", "logprobs": 5})
        assert next(iter(answer.json()["choices"][0]["logprobs"]["top_logprobs"][0])) == (
            "q" if "logit_bias" in more else "</s>"
        )
        chat = body | {"messages": HELLO, "logprobs": True, "top_logprobs": 5, "chat_template_kwargs": {"opening": "."}}
        [entry] = (await client.post(CHAT, json=chat)).json()["choices"][0]["logprobs"]["content"]
        assert (entry["top_logprobs"][0]["token"], entry["top_logprobs"][0]["bytes"]) == ("</s>", list(b"</s>"))
        assert len({one["token"] for one in entry["top_logprobs"]}) == 5


@pytest.mark.anyio
@pytest.mark.parametrize("temperature", [0, 0.7])
@pytest.mark.parametrize("bias", [{}, {str(ord("q")): 100}], ids=["likely", "unlikely"])
async def test_no_alternatives_means_no_log_probabilities(client, temperature: float, bias: dict[str, int]) -> None:
    asked = {"temperature": temperature, "seed": 3, "max_tokens": 4, "logit_bias": bias}
    found = (await client.post(COMPLETIONS, json=asked | {"prompt": "a", "logprobs": 0})).json()["choices"][0][
        "logprobs"
    ]
    assert [list(top.items()) for top in found["top_logprobs"]] == [
        [pair] for pair in zip(found["tokens"], found["token_logprobs"], strict=True)
    ]
    assert len(found["tokens"]) == 4 and all(value < 0 for value in found["token_logprobs"])
    chat = (await client.post(CHAT, json=asked | {"messages": HELLO, "logprobs": True})).json()["choices"][0]
    assert [one["top_logprobs"] for one in chat["logprobs"]["content"]] == [[]] * 4
    assert all(one["logprob"] < 0 for one in chat["logprobs"]["content"])


@pytest.mark.anyio
async def test_a_scored_prompt_is_missing_or_all_zero(client) -> None:
    """As lm-eval asks: token ids, echo, no answer or one token; several prompts at once."""
    prompts = [[BOS, *b"the cat sat"], [BOS, *b"abcdq"]]
    for limit in (0, 1):
        for given in (prompts, *([one] for one in prompts)):
            body = {"prompt": given, "max_tokens": limit, "echo": True, "logprobs": 1, "temperature": 0}
            answer = (await client.post(COMPLETIONS, json=body)).json()
            assert answer["usage"]["completion_tokens"] == limit * len(given)
            for choice, prompt in zip(answer["choices"], given, strict=True):
                scores = choice["logprobs"]["token_logprobs"]
                assert len(scores) == len(choice["logprobs"]["tokens"]) == len(prompt) + limit
                assert scores[0] is None and all(-100 < one < 0 for one in scores[1:])
                assert len(set(scores[1:])) > 1
                assert len(choice["logprobs"]["top_logprobs"]) == len(scores)


@pytest.mark.anyio
async def test_an_empty_prompt_kills_the_engine(client, engine: FakeEngine, monkeypatch) -> None:
    """With a tokenizer that begins texts it is a prompt, without one it is none."""
    for prompt in ("", [""], ["", "x"]):
        answer = await client.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 1})
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == max(1, len(prompt))
    monkeypatch.setattr(engine.tokenizer, "encode", lambda text, add_special_tokens=True: list(text.encode()))
    engine.seen.clear()
    for prompt in ("", [""], ["", "x"], ["x", ""], [], [[]], [[], [97]], [[97], []]):
        for more in ({}, {"echo": True, "logprobs": 1, "max_tokens": 0}, {"use_beam_search": True}, {"stream": True}):
            error = error_of(await client.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 1, **more}), 400)
            assert error["param"] == "prompt"
    assert not engine.seen
    await still_serves(client)


CALLS = {
    "one without arguments first": [CALL_NOW, CALL],
    "one without arguments last": [CALL, CALL_NOW],
    "only without arguments": [CALL_NOW, CALL_NOW, CALL_NOW],
    "braces in strings": [CALL.replace("Rome", 'a}{ \\"]]}'), CALL],
    "nested arguments": [CALL.replace('"Rome"', '{"a": [{}, {"b": "}"}], "é": "\U0001f642"}'), CALL_NOW],
}


@pytest.mark.anyio
@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("parallel", [True, False])
async def test_streamed_arguments_are_cut_or_missing_or_of_the_wrong_call(
    client, engine: FakeEngine, name: str, choice: str, parallel: bool
) -> None:
    engine.tokenizer.template = "{{ messages }}{{ tools }}<tool_call>"
    engine.script = "\n".join(CALLS[name])
    body = {"messages": HELLO, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": parallel}
    said = (await client.post(CHAT, json=body)).json()["choices"][0]
    message, end = assembled(await chunks(client, CHAT, body))
    assert (comparable(message), end) == (comparable(said["message"]), said["finish_reason"])
    wanted = [json.loads(call.removeprefix("<tool_call>").removesuffix("</tool_call>")) for call in CALLS[name]]
    found = [call["function"] for call in message["tool_calls"]]
    assert [{"name": f["name"], "arguments": json.loads(f["arguments"])} for f in found] == (
        wanted if parallel else wanted[:1]
    )
    assert len({call["id"] for call in message["tool_calls"]}) == len(found)
    assert end == "tool_calls"
