"""Structured outputs from tokenizer to device: a tiny random model that would never say anything of the sort by itself.

Its vocabulary is all bytes and a few tokens of several bytes, which cross the borders of a grammar's parts. Whatever
else happens to a request (temperature, log probabilities, cached pages, preemption), its text is what was asked for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxserve.host.scheduler import Counts
from jaxserve.llm import LLM
from jaxserve.types import CompletionOutput, Request, RequestOutput, SamplingParams, StructuredOutputsParams
from tests.device.engines import Tight, engine, run
from tests.models.cases import Case

MERGES = [("{", '"'), ('"', ":"), ('"', ","), ("Ð", "º"), ("Ð", "»"), ("Ð", "°"), ("y", "e"), ("ye", "s"), ("0", "0")]
"""In the letters that byte-level vocabularies write for bytes."""
END = 256 + len(MERGES)
MOST = 200
TIGHT_PAGES = 34
"""Enough for the longest answer, not for all of them."""
PROMPT = "Tell me all about it, in the form that was agreed upon, and say nothing that is not part of it: "
"""Longer than what a step may compute."""

SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {
        "ключ": {"enum": ["🙂", "да", 'a"b\\c']},
        'a"b': {"type": "string", "maxLength": 6},
        "list": {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 300}, "maxItems": 3},
    },
    "required": ["ключ", 'a"b', "list"],
    "additionalProperties": False,
}
CHOICES = ("yes", "yes, да", "🙂", 'n"o')
SHAPES = {
    "json": StructuredOutputsParams(json=SCHEMA),
    "regex": StructuredOutputsParams(regex=r"(кл|00|\{\"){2,4}-[0-9a-f]{3}\."),
    "choice": StructuredOutputsParams(choice=CHOICES),
    "grammar": StructuredOutputsParams(grammar='root ::= "[" item ("," item)? "]"\nitem ::= "yes" | "🙂"'),
}


def fits(kind: str, text: str) -> bool:
    if kind == "json":
        return Draft202012Validator(SCHEMA).is_valid(json.loads(text))
    if kind == "choice":
        return text in CHOICES
    pattern = SHAPES["regex"].regex if kind == "regex" else r"\[(yes|🙂)(,(yes|🙂))?\]"
    return re.fullmatch(pattern or "", text) is not None


def byte_level(place: Path) -> None:
    """A token for each byte, for what the merges make, and one that ends a text."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in MERGES)]
    words = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, MERGES))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens(["<end>"])
    words.save(str(place / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (place / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    source, place = Case("llama3").directory, tmp_path_factory.mktemp("speaking")
    config = json.loads((source / "config.json").read_text())
    config |= {"vocab_size": END + 1, "max_position_embeddings": 1024, "eos_token_id": END}
    (place / "config.json").write_text(json.dumps(config))
    weights = load_file(source / "model.safetensors")
    drawn = np.random.default_rng(0).normal(0, 0.3, (END + 1, config["hidden_size"]))
    save_file(weights | {"model.embed_tokens.weight": drawn.astype(np.float32)}, place / "model.safetensors")
    byte_level(place)
    small = {"token_buckets": (64,), "max_num_seqs": 4, "block_size": 8, "num_pages": 300, "dtype": "float32"}
    with LLM(str(place), **small) as found:
        yield found


def params(kind: str, temperature: float = 0, **others: object) -> SamplingParams:
    base = SamplingParams(temperature=temperature, max_tokens=MOST, seed=7, structured_outputs=SHAPES[kind])
    return base.clone(**others)


def said(llm: LLM, *asked: SamplingParams) -> list[CompletionOutput]:
    """The answers to the same prompt, side by side."""
    outputs = llm.generate([PROMPT] * len(asked), list(asked), use_tqdm=False)
    return [choice for output in outputs for choice in output.outputs]


@pytest.mark.parametrize("temperature", [0, 1])
def test_every_text_is_what_was_asked_for_and_ends_by_itself(llm: LLM, temperature: float) -> None:
    free = SamplingParams(temperature=temperature, max_tokens=30, seed=7, ignore_eos=True)
    asked = [params(kind, temperature, seed=seed) for kind in SHAPES for seed in range(4)]
    *answers, beside = said(llm, *asked, free)
    for kind, answer in zip([kind for kind in SHAPES for _ in range(4)], answers, strict=True):
        assert fits(kind, answer.text), answer.text
        assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
        assert len(answer.token_ids) < MOST
    assert beside.text == said(llm, free)[0].text, "who asks for no shape is not disturbed"
    assert not fits("regex", beside.text)


@pytest.mark.parametrize("blanks", [" ", "\n", "\n\t", "\r\n "])
def test_a_model_that_only_knows_blanks_ends_all_the_same(llm: LLM, blanks: str) -> None:
    bias = dict.fromkeys(llm.tokenizer.encode(blanks), 100.0)
    [answer] = said(llm, params("json", logit_bias=bias, max_tokens=900))
    assert fits("json", answer.text) and answer.finish_reason == "stop"
    assert answer.text.count(blanks[-1]) > 3, "it would go on if it could"


def test_text_that_is_not_ascii_is_written_as_it_is(llm: LLM) -> None:
    answers = said(llm, *(params("json", 1, seed=seed) for seed in range(8)))
    assert all('"ключ"' in one.text and '"a\\"b"' in one.text for one in answers)
    assert len({json.loads(one.text)["ключ"] for one in answers}) == 3, "each of the values may come"


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("temperature", [0, 1])
def test_log_probabilities_change_nothing(llm: LLM, kind: str, temperature: float) -> None:
    """Without them tokens that are certain are taken in together; with them each is computed, and counted once."""
    one = params(kind, temperature, frequency_penalty=0.7, presence_penalty=-0.4, repetition_penalty=1.1)
    plain, scored = said(llm, one, one.clone(logprobs=2))
    assert (scored.text, scored.token_ids) == (plain.text, plain.token_ids)
    assert scored.logprobs is not None
    assert [next(iter(entry)) for entry in scored.logprobs] == list(scored.token_ids)
    assert all(np.isfinite(one.logprob) for entry in scored.logprobs for one in entry.values())


@pytest.mark.parametrize("kind", SHAPES)
def test_each_choice_goes_its_own_way(llm: LLM, kind: str) -> None:
    answers = [one for seed in range(4) for one in said(llm, params(kind, 2, n=2, seed=seed))]
    assert all(fits(kind, one.text) and one.finish_reason == "stop" for one in answers)
    assert len({one.text for one in answers}) > 1


def everything(llm: LLM, tight: Tight | None = None, rounds: int = 1) -> tuple[dict[str, RequestOutput], Counts]:
    """Every shape at once on an engine with these limits: the answers of the last round, and what was counted."""
    small, prompt = engine(llm._launched, tight), tuple(llm.tokenizer.encode(PROMPT))
    requests = [Request(f"{kind}{t}", prompt, params(kind, t, n=1 + t)) for kind in SHAPES for t in (0, 1)]
    for _ in range(rounds):
        answers = run(small, requests, llm._launched.grammars)
    return answers, small.scheduler.counts


@pytest.mark.parametrize("tokens", [None, 7], ids=["plain", "chunks"])
def test_stepping_aside_and_cached_pages_change_nothing(llm: LLM, tokens: int | None) -> None:
    want = {name: [one.text for one in out.outputs] for name, out in everything(llm)[0].items()}
    assert all(fits(name[:-1], text) for name, texts in want.items() for text in texts)
    again, hits = everything(llm, Tight(tokens=tokens), rounds=2)
    tight, steps_aside = everything(llm, Tight(tokens=tokens, pages=TIGHT_PAGES, depth=3))
    for answers in (again, tight):
        assert {name: [one.text for one in out.outputs] for name, out in answers.items()} == want
    assert hits.prefix_hits > 0 and all(out.num_cached_tokens > 0 for out in again.values())
    assert steps_aside.preemptions > 0
