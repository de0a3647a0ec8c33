"""Samples: their lengths, what they have in common, and that the seed decides."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from server.bench import datasets
from server.bench.datasets import Dataset
from server.bench.vocabulary import WordVocabulary
from tests.server.fake_engine import FakeTokenizer

BYTES = FakeTokenizer()
"""A token a byte, and one that begins each text."""


def random_set(**more: object) -> Dataset:
    return Dataset(**{"num_prompts": 20, "random_input_len": 40, "random_output_len": 8, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize("vocabulary", [BYTES, WordVocabulary()], ids=["bytes", "words"])
def test_random_prompts_have_the_very_length(vocabulary):
    samples = random_set().draw(vocabulary)
    assert {len(vocabulary.encode(sample.prompt)) for sample in samples} == {40}
    assert {(sample.prompt_tokens, sample.output_tokens) for sample in samples} == {(40, 8)}
    assert len({sample.prompt for sample in samples}) == 20


def test_the_seed_decides():
    assert random_set(seed=3).draw(BYTES) == random_set(seed=3).draw(BYTES)
    assert random_set(seed=3).draw(BYTES) != random_set(seed=4).draw(BYTES)
    again = random_set().again(1)
    assert again.num_prompts == 20 and again.draw(BYTES) != random_set().draw(BYTES)


def test_lengths_are_drawn_from_the_range():
    samples = random_set(num_prompts=300, random_range_ratio=0.5).draw(WordVocabulary())
    prompts, outputs = {s.prompt_tokens for s in samples}, {s.output_tokens for s in samples}
    assert (min(prompts), max(prompts)) == (20, 60)
    assert (min(outputs), max(outputs)) == (4, 12)


def test_a_random_prefix_comes_before_every_prompt():
    samples = random_set(random_prefix_len=30).draw(BYTES)
    assert {sample.prompt_tokens for sample in samples} == {70}
    assert len({sample.prompt[:29] for sample in samples}) == 1
    assert len({sample.prompt for sample in samples}) == 20


def test_prefixes_are_repeated():
    wanted = Dataset(
        dataset_name="prefix_repetition", num_prompts=12, prefix_repetition_num_prefixes=3,
        prefix_repetition_prefix_len=50, prefix_repetition_suffix_len=20, prefix_repetition_output_len=5,
    )  # fmt: skip
    samples = wanted.draw(BYTES)
    assert {(sample.prompt_tokens, sample.output_tokens) for sample in samples} == {(70, 5)}
    common = [sample.prompt[:49] for sample in samples]
    assert sorted(common.count(prefix) for prefix in set(common)) == [4, 4, 4]
    assert len({sample.prompt for sample in samples}) == 12
    assert wanted.again(1, 1).draw(BYTES)[0].prompt_tokens == 70


def conversation(question: str, answer: str) -> dict[str, object]:
    return {"id": "x", "conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}


@pytest.fixture
def sharegpt(tmp_path: Path) -> str:
    file = tmp_path / "conversations.json"
    told = [
        conversation("How are you?", "Quite well."),
        conversation("x" * 1025, "too long a question"),
        conversation("x" * 1000, "y" * 1100),
        conversation("no", "too short a question"),
        {"id": "y", "conversations": [{"value": "a question without an answer"}]},
        conversation("Why is it so?", "Because."),
    ]
    file.write_text(json.dumps(told))
    return str(file)


def test_conversations_that_fit(sharegpt: str):
    wanted = Dataset(dataset_name="sharegpt", dataset_path=sharegpt, num_prompts=2, disable_shuffle=True)
    found = [(s.prompt, s.prompt_tokens, s.output_tokens) for s in wanted.draw(BYTES)]
    assert found == [("How are you?", 13, 11), ("Why is it so?", 14, 8)]


def test_conversations_come_round_again_or_not(sharegpt: str):
    wanted = {"dataset_name": "sharegpt", "dataset_path": sharegpt, "num_prompts": 5, "sharegpt_output_len": 7}
    samples = Dataset(**wanted).draw(BYTES)
    assert [sample.output_tokens for sample in samples] == [7] * 5
    assert len({sample.prompt for sample in samples}) == 3  # with shorter answers, the long question fits too
    assert len(Dataset(**wanted, no_oversample=True).draw(BYTES)) == 3


def test_a_custom_file_says_what_is_asked(tmp_path: Path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one", "output_tokens": 3}\n\n{"prompt": "three"}\n')
    wanted = Dataset(dataset_name="custom", dataset_path=str(file), num_prompts=2, disable_shuffle=True)
    assert [(s.prompt, s.prompt_tokens, s.output_tokens) for s in wanted.draw(BYTES)] == [
        ("one", 4, 3),
        ("three", 6, 256),
    ]
    many = Dataset(dataset_name="custom", dataset_path=str(file), num_prompts=2, seed=1)
    assert sorted(s.prompt for s in many.draw(BYTES)) == ["one", "three"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"prompt": "a"}\n{"prmpt": "b"}\n', "line 2 of"),
        ('{"prompt": 3}\n', "Expected `str`"),
        ("", "has no prompt that fits"),
    ],
)
def test_a_bad_custom_file_is_told(tmp_path: Path, text: str, told: str):
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=told):
        Dataset(dataset_name="custom", dataset_path=str(file)).draw(BYTES)


@pytest.mark.parametrize("name", ["sharegpt", "custom"])
def test_a_missing_file_is_told(tmp_path: Path, name: str):
    with pytest.raises(ValueError, match=r"cannot read .*nowhere"):
        Dataset(dataset_name=name, dataset_path=str(tmp_path / "nowhere")).draw(BYTES)


def read(*words: str) -> Dataset:
    parser = argparse.ArgumentParser()
    datasets.add_flags(parser)
    return datasets.read_flags(parser.parse_args(words))


def test_flags_have_the_defaults_of_the_record():
    assert read() == Dataset()
    found = read("--random-input-len", "5", "--random-range-ratio", "0.5", "--seed", "9", "--num-prompts", "2")
    assert found == Dataset(random_input_len=5, random_range_ratio=0.5, seed=9, num_prompts=2)
    short = read("--input-len", "5", "--output-len", "6", "--dataset-name", "prefix_repetition")
    assert (short.prefix_repetition_suffix_len, short.prefix_repetition_output_len) == (5, 6)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--dataset-name", "custom"), "needs a file, --dataset-path"),
        (("--dataset-path", "x"), "--dataset-path is of no use"),
        (("--sharegpt-output-len", "3"), "--sharegpt-output-len is of no use for --dataset-name random"),
        (("--random-input-len", "0"), "--random-input-len must be at least 1"),
        (("--random-prefix-len", "-1"), "--random-prefix-len must be at least 0"),
        (("--random-range-ratio", "1"), "--random-range-ratio must be in"),
        (("--num-prompts", "0"), "--num-prompts must be at least 1"),
        (("--num-prompts", "3", "--dataset-name", "prefix_repetition"), "--prefix-repetition-num-prefixes"),
        (("--random-input-len", "3", "--dataset-name", "prefix_repetition"), "--random-input-len is of no use"),
        (("--input-len", "3", "--dataset-name", "custom", "--dataset-path", "x"), "--input-len is of no use"),
    ],
)
def test_impossible_flags_are_told(words: tuple[str, ...], told: str):
    with pytest.raises(ValueError, match=told):
        read(*words)
