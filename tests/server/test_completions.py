"""/v1/completions over the fake engine, whose answers are known."""

from __future__ import annotations

import json

import httpx
import pytest
from msgspec.structs import replace

from jaxserve.types import CompletionOutput, SamplingParams
from tests.server.fake_engine import BOS, Choice, FakeEngine

pytestmark = pytest.mark.anyio


async def ask(client: httpx.AsyncClient, **fields: object) -> dict:
    response = await client.post("/v1/completions", json={"model": "toy", "temperature": 0, **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def stream(client: httpx.AsyncClient, path: str = "/v1/completions", **fields: object) -> list[dict]:
    """The chunks of a stream, after checking its form."""
    response = await client.post(path, json={"model": "toy", "temperature": 0, "stream": True, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    assert all(block.startswith("data: {") and "\n" not in block for block in blocks[:-2])
    chunks = [json.loads(block[6:]) for block in blocks[:-2]]
    assert len({(c["id"], c["created"], c["model"]) for c in chunks}) == 1
    return chunks


async def test_an_answer_has_openais_shape(client: httpx.AsyncClient) -> None:
    answer = await ask(client, prompt="say: x", max_tokens=4)
    assert answer.pop("created") > 1_700_000_000
    assert answer.pop("id").startswith("cmpl-")
    assert answer == {
        "object": "text_completion",
        "model": "toy",
        "choices": [{"index": 0, "text": "yzab", "logprobs": None, "finish_reason": "length", "stop_reason": None}],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 4,
            "total_tokens": 11,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
        "system_fingerprint": None,
    }


async def test_sixteen_tokens_unless_asked_and_never_beyond_the_context(engine: FakeEngine, client) -> None:
    assert (await ask(client, prompt="x"))["usage"]["completion_tokens"] == 16
    engine.max_model_len = 12
    answer = await ask(client, prompt="x" * 7)
    assert answer["usage"]["completion_tokens"] == 4
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("a", ["bc"]),
        (["a", "k"], ["bc", "lm"]),
        ([BOS, ord("a")], ["bc"]),
        ([[BOS, ord("a")], [ord("k")]], ["bc", "lm"]),
        ("", ["ab"]),
    ],
)
async def test_prompts_come_in_four_forms(client, prompt: object, texts: list[str]) -> None:
    answer = await ask(client, prompt=prompt, max_tokens=2)
    assert [c["text"] for c in answer["choices"]] == texts
    assert [c["index"] for c in answer["choices"]] == list(range(len(texts)))


async def test_choices_of_several_prompts_are_numbered_in_a_row(client) -> None:
    answer = await ask(client, prompt=["a", "k"], n=2, max_tokens=2)
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "bc"), (1, "bc"), (2, "lm"), (3, "lm")]
    assert answer["usage"]["prompt_tokens"] == 4
    assert answer["usage"]["completion_tokens"] == 8


async def test_special_tokens_of_the_prompt_can_be_left_out(client) -> None:
    assert (await ask(client, prompt="abc", add_special_tokens=False))["usage"]["prompt_tokens"] == 3


async def test_an_answer_that_could_not_go_on_says_so_and_keeps_what_was_said(client, monkeypatch) -> None:
    advance, why = FakeEngine._advance, "structured_outputs: nothing was left"

    def dead_end(self: FakeEngine, c: Choice, p: SamplingParams, limit: int) -> CompletionOutput:
        piece = advance(self, c, p, limit)
        if len(c.generated) < 3:
            return piece
        c.reason, c.stop_reason = "error", why
        return replace(piece, finish_reason="error", stop_reason=why)

    monkeypatch.setattr(FakeEngine, "_advance", dead_end)
    whole = (await ask(client, prompt="a", max_tokens=9))["choices"][0]
    assert (whole["text"], whole["finish_reason"], whole["stop_reason"]) == ("bcd", "error", why)
    last = (await stream(client, prompt="a", max_tokens=9))[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("error", why)
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9}
    last = (await stream(client, "/v1/chat/completions", **chat))[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("error", why)
    response = await client.post("/v1/chat/completions", json={"model": "toy", "temperature": 0, **chat})
    said = response.json()["choices"][0]
    assert (len(said["message"]["content"]), said["finish_reason"], said["stop_reason"]) == (3, "error", why)


async def test_the_end_and_what_caused_it(client) -> None:
    by_eos = (await ask(client, prompt="a.", max_tokens=5))["choices"][0]
    assert (by_eos["text"], by_eos["finish_reason"], by_eos["stop_reason"]) == ("", "stop", None)
    by_text = (await ask(client, prompt="a", max_tokens=9, stop=["ef"]))["choices"][0]
    assert (by_text["text"], by_text["finish_reason"], by_text["stop_reason"]) == ("bcd", "stop", "ef")
    by_id = (await ask(client, prompt="a", max_tokens=9, stop_token_ids=[ord("d")]))["choices"][0]
    assert (by_id["text"], by_id["finish_reason"], by_id["stop_reason"]) == ("bc", "stop", ord("d"))


async def test_a_stream_says_the_same_as_an_answer(client) -> None:
    whole = await ask(client, prompt="a!", max_tokens=5)
    chunks = await stream(client, prompt="a!", max_tokens=5, stream_options={"include_usage": True})
    *pieces, last = chunks
    assert "".join(c["choices"][0]["text"] for c in pieces) == whole["choices"][0]["text"] == "éabc"
    assert [c["choices"][0]["finish_reason"] for c in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert all(c["usage"] is None for c in pieces)
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]


async def test_no_usage_unless_asked_and_on_every_chunk_if_asked(client) -> None:
    assert all("usage" not in c for c in await stream(client, prompt="a", max_tokens=2))
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await stream(client, prompt="a", max_tokens=3, stream_options=options)
    assert [c["usage"]["completion_tokens"] for c in chunks] == [1, 2, 3, 3]


async def test_a_stream_of_several_prompts_and_choices(client) -> None:
    texts: dict[int, str] = {}
    ends: list[int] = []
    for chunk in await stream(client, prompt=["a", "k", "p"], n=2, max_tokens=3):
        [choice] = chunk["choices"]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        ends += [choice["index"]] if choice["finish_reason"] else []
    assert texts == {0: "bcd", 1: "bcd", 2: "lmn", 3: "lmn", 4: "qrs", 5: "qrs"}
    assert sorted(ends) == list(range(6))


async def test_echo_puts_the_prompt_before_the_answer(client) -> None:
    assert (await ask(client, prompt="xa", max_tokens=2, echo=True))["choices"][0]["text"] == "xabc"
    ids = (await ask(client, prompt=[BOS, ord("x"), ord("a")], max_tokens=2, echo=True))["choices"][0]
    assert ids["text"] == "xabc"
    chunks = await stream(client, prompt="xa", max_tokens=2, echo=True, n=2)
    for index in (0, 1):
        assert "".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == index) == "xabc"


async def test_logprobs_are_lists_beside_each_other(client) -> None:
    found = (await ask(client, prompt="a", max_tokens=3, logprobs=2))["choices"][0]["logprobs"]
    assert found["tokens"] == ["b", "c", "d"]
    assert found["text_offset"] == [0, 1, 2]
    assert [list(top) for top in found["top_logprobs"]] == [["b", "c"], ["c", "d"], ["d", "e"]]
    assert all(
        top[t] == lp < 0
        for t, lp, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True)
    )


async def test_a_chosen_token_outside_the_top_is_one_more(client) -> None:
    bias = {str(ord("q")): 100}
    found = (await ask(client, prompt="a", max_tokens=1, logprobs=2, logit_bias=bias))["choices"][0]["logprobs"]
    assert list(found["top_logprobs"][0]) == ["q", "b", "c"]


async def test_logprobs_zero_tells_of_the_chosen_token(client) -> None:
    found = (await ask(client, prompt="a", max_tokens=2, logprobs=0))["choices"][0]["logprobs"]
    assert [list(top) for top in found["top_logprobs"]] == [["b"], ["c"]]


async def test_half_characters_are_named_by_their_bytes(client) -> None:
    found = (await ask(client, prompt="!", max_tokens=3, logprobs=0))["choices"][0]
    assert found["text"] == "éa"
    assert found["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "a"]
    assert found["logprobs"]["text_offset"] == [0, 0, 1]


async def test_tokens_can_be_named_by_their_ids(client) -> None:
    found = await ask(client, prompt="a", max_tokens=1, logprobs=1, return_tokens_as_token_ids=True)
    assert found["choices"][0]["logprobs"]["tokens"] == [f"token_id:{ord('b')}"]


async def test_scoring_a_prompt_without_an_answer(client) -> None:
    answer = await ask(client, prompt="abq", max_tokens=0, echo=True, logprobs=1)
    [choice] = answer["choices"]
    assert choice["text"] == "abq"
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    found = choice["logprobs"]
    assert found["tokens"] == ["<s>", "a", "b", "q"]
    assert found["text_offset"] == [0, 0, 1, 2]
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    assert [list(top) for top in found["top_logprobs"][1:]] == [["a"], ["b"], ["q", "c"]]


async def test_scoring_with_an_answer_and_as_a_stream(client) -> None:
    answer = await ask(client, prompt="ab", max_tokens=2, echo=True, logprobs=0)
    found = answer["choices"][0]["logprobs"]
    assert found["tokens"] == ["<s>", "a", "b", "c", "d"]
    assert found["text_offset"] == [0, 0, 1, 2, 3]
    chunks = await stream(client, prompt="ab", max_tokens=2, echo=True, logprobs=0)
    for name in ("tokens", "text_offset"):
        assert [entry for c in chunks for entry in c["choices"][0]["logprobs"][name]] == found[name]


async def test_prompt_logprobs_are_by_token_id(client) -> None:
    found = (await ask(client, prompt="ab", max_tokens=1, prompt_logprobs=0))["choices"][0]["prompt_logprobs"]
    assert found[0] is None
    assert [list(entry) for entry in found[1:]] == [[str(ord("a"))], [str(ord("b"))]]
    assert found[1][str(ord("a"))]["rank"] == 1
    assert found[1][str(ord("a"))]["decoded_token"] == "a"


async def test_token_ids_come_back_on_request(client) -> None:
    [choice] = (await ask(client, prompt="a", max_tokens=2, return_token_ids=True))["choices"]
    assert choice["token_ids"] == [ord("b"), ord("c")]
    assert choice["prompt_token_ids"] == [BOS, ord("a")]
    chunks = await stream(client, prompt="a", max_tokens=2, return_token_ids=True)
    assert [c["choices"][0]["token_ids"] for c in chunks] == [[ord("b")], [ord("c")]]
    assert [c["choices"][0].get("prompt_token_ids") for c in chunks] == [[BOS, ord("a")], None]


async def test_cached_tokens_are_told(client) -> None:
    answer = await ask(client, prompt="x" * 40, max_tokens=1)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}


FORMS = [("xa", ["xa"]), (["xa", "k"], ["xa", "k"]), ([BOS, 120, 97], ["xa"]), ([[120, 97], [107]], ["xa", "k"])]
EXTRAS = [
    {},
    {"return_tokens_as_token_ids": True, "logprobs": 1},
    {"return_token_ids": True},
    {"prompt_logprobs": 1},
    {"cache_salt": "mine"},
    {"priority": 0},
    {"best_of": 3},
    {"use_beam_search": True, "logprobs": None},
]


@pytest.mark.parametrize("extra", EXTRAS, ids=str)
@pytest.mark.parametrize(("prompt", "texts"), FORMS, ids=str)
async def test_every_form_of_prompt_goes_with_echo_n_and_every_extra(client, engine, prompt, texts, extra) -> None:
    """Choices are numbered prompt by prompt, and each begins with its own prompt."""
    answer = await ask(client, prompt=prompt, n=2, echo=True, max_tokens=2, **extra)
    choices = answer["choices"]
    assert [c["index"] for c in choices] == list(range(2 * len(texts)))
    assert [c["text"][: len(text)] for c, text in zip(choices, [t for t in texts for _ in (0, 1)], strict=True)] == [
        text for text in texts for _ in (0, 1)
    ]
    if "cache_salt" in extra:
        assert set(engine.salts) == {"mine"}
    for choice in choices:
        assert (choice["logprobs"] is not None) == ("logprobs" in extra and extra["logprobs"] is not None)
        assert ("token_ids" in choice) == ("return_token_ids" in extra)
        assert ("prompt_logprobs" in choice) == ("prompt_logprobs" in extra)
        if extra.get("return_tokens_as_token_ids"):
            assert all(name.startswith("token_id:") for name in choice["logprobs"]["tokens"])


async def test_the_best_of_several_are_told_best_first(client, engine: FakeEngine) -> None:
    fields = {"prompt": "a", "max_tokens": 3, "temperature": 1.3, "seed": 5}
    drawn = (await ask(client, **fields, n=6, logprobs=0))["choices"]
    means = {c["text"]: sum(c["logprobs"]["token_logprobs"]) / 3 for c in drawn}
    assert len(means) == 6
    wanted = sorted(means, key=lambda text: -means[text])[:2]
    answer = await ask(client, **fields, n=2, best_of=6)
    assert [(c["index"], c["text"], c["logprobs"]) for c in answer["choices"]] == [
        (0, wanted[0], None),
        (1, wanted[1], None),
    ]
    assert answer["usage"]["completion_tokens"] == 18
    assert engine.params[-1].logprobs == 0


async def test_the_best_ones_log_probabilities_are_told_if_asked(client) -> None:
    fields = {"prompt": ["a", "k"], "max_tokens": 3, "temperature": 1.3, "seed": 4, "logprobs": 1}
    answer = await ask(client, **fields, best_of=5)
    assert [c["index"] for c in answer["choices"]] == [0, 1]
    assert all(len(c["logprobs"]["tokens"]) == 3 for c in answer["choices"])


async def test_a_best_of_as_many_as_are_told_changes_nothing(client) -> None:
    fields = {"prompt": "a", "max_tokens": 3, "temperature": 1.3, "seed": 4, "n": 3}
    plain = [c["text"] for c in (await ask(client, **fields))["choices"]]
    assert [c["text"] for c in (await ask(client, **fields, best_of=3))["choices"]] == plain
    texts = ["", "", ""]
    for chunk in await stream(client, **fields, best_of=3):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == plain


async def test_every_sampling_field_reaches_the_engine(client, engine: FakeEngine) -> None:
    await ask(
        client, prompt="a", max_tokens=3, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, presence_penalty=0.2,
        frequency_penalty=0.3, repetition_penalty=1.1, seed=5, min_tokens=2, ignore_eos=True, skip_special_tokens=False,
        spaces_between_special_tokens=False, logit_bias={"98": 500}, allowed_token_ids=[97, 98], bad_words=["zz"],
        include_stop_str_in_output=True, stop="Q", cache_salt="mine",
    )  # fmt: skip
    p = engine.params[-1]
    assert (p.temperature, p.top_p, p.top_k, p.min_p) == (0.5, 0.9, 7, 0.1)
    assert (p.presence_penalty, p.frequency_penalty, p.repetition_penalty, p.seed) == (0.2, 0.3, 1.1, 5)
    assert (p.min_tokens, p.ignore_eos, p.skip_special_tokens, p.spaces_between_special_tokens) == (
        2,
        True,
        False,
        False,
    )
    assert (p.logit_bias, p.allowed_token_ids, p.bad_words, p.stop) == ({98: 100.0}, (97, 98), ("zz",), ("Q",))
    assert p.include_stop_str_in_output
    assert engine.salts[-1] == "mine"


async def test_the_models_defaults_stand_between_the_request_and_openais(client, engine: FakeEngine) -> None:
    engine.default_params = {"temperature": 0.3, "top_k": 40, "max_tokens": 3}
    await client.post("/v1/completions", json={"prompt": "a", "top_k": 2})
    p = engine.params[-1]
    assert (p.temperature, p.top_k, p.top_p, p.max_tokens) == (0.3, 2, 1.0, 16)


async def test_a_top_k_beyond_the_vocabulary_is_off(client, engine: FakeEngine) -> None:
    for top_k in (0, -1, 10**7, 10**30):
        await ask(client, prompt="a", max_tokens=1, top_k=top_k)
        assert engine.params[-1].top_k == 0
