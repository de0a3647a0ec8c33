"""`LLM` on a tiny checkpoint whose generation config ends a text at two tokens: its defaults, its ends, beam search."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve.llm import LLM
from jaxserve.types import BeamSearchParams, InvalidRequest, SamplingParams
from tests.device.engines import with_tokenizer
from tests.models.cases import Case

VOCAB, ENDS = 101, (2, 7)
PROMPT = [5, 9, 11]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    place = tmp_path_factory.mktemp("two-ends")
    for file in with_tokenizer(Case("llama3").directory).iterdir():
        (place / file.name).symlink_to(file)
    (place / "generation_config.json").write_text('{"eos_token_id": [2, 7], "temperature": 0.3, "top_k": 9}')
    with start(place, override_generation_config={"temperature": 0.5}, max_logprobs=-1) as found:
        yield found


def start(place: Path, **options: object) -> LLM:
    small = {"token_buckets": (64,), "max_num_seqs": 4, "block_size": 8, "num_pages": 60, "dtype": "float32"}
    return LLM(str(place), **small, **options)


def sampled(llm: LLM, **params: object) -> tuple[tuple[int, ...], str | None]:
    greedy = SamplingParams(temperature=0).clone(**params)
    [answer] = llm.generate(PROMPT, greedy, use_tqdm=False)[0].outputs
    return answer.token_ids, answer.finish_reason


def distribution(llm: LLM, *texts: list[int]) -> list[dict[int, float]]:
    """Log probabilities of every token after each text."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, ignore_eos=True)
    found = [out.outputs[0].logprobs for out in llm.generate(list(texts), params, use_tqdm=False)]
    return [{token: one.logprob for token, one in (scores or ())[0].items()} for scores in found]


def test_an_override_beats_the_checkpoints_sampling_and_nothing_else(llm: LLM) -> None:
    defaults = llm.get_default_sampling_params()
    assert (defaults.temperature, defaults.top_k) == (0.5, 9)


@pytest.mark.parametrize("end", ENDS)
def test_each_token_of_the_eos_list_ends_a_text(llm: LLM, end: int) -> None:
    """The bias makes it the likeliest; before `min_tokens` it cannot come."""
    tokens, reason = sampled(llm, logit_bias={end: 100}, min_tokens=2, max_tokens=8)
    assert (len(tokens), tokens[-1], reason) == (3, end, "stop")
    assert not set(tokens[:2]) & set(ENDS)


@pytest.mark.parametrize("end", ENDS)
def test_ignore_eos_passes_each_of_them(llm: LLM, end: int) -> None:
    assert sampled(llm, logit_bias={end: 100}, ignore_eos=True, max_tokens=8) == ((end,) * 8, "length")


def test_one_beam_is_greedy(llm: LLM) -> None:
    [found] = llm.beam_search([PROMPT], BeamSearchParams(beam_width=1, max_tokens=12, ignore_eos=True))
    tokens, _ = sampled(llm, ignore_eos=True, max_tokens=12)
    [best] = found.sequences
    assert best.tokens == [*PROMPT, *tokens]
    assert best.text == " ".join(f"t{token}" for token in best.tokens)


def test_the_best_beams_are_the_best_of_all_answers(llm: LLM) -> None:
    """All answers of up to two tokens, listed: as wide as the vocabulary, the search loses none of the best."""
    [first] = distribution(llm, PROMPT)
    listed = {(end,): first[end] for end in ENDS}
    later = distribution(llm, *([*PROMPT, token] for token in range(VOCAB)))
    for token, found in enumerate(later):
        if token not in ENDS:
            listed |= {(token, other): first[token] + value for other, value in found.items()}
    wanted = sorted(listed.items(), key=lambda item: item[1], reverse=True)[:20]
    params = BeamSearchParams(beam_width=VOCAB, max_tokens=2, length_penalty=0, include_stop_str_in_output=True)
    [found] = llm.beam_search(PROMPT, params)
    assert [tuple(one.tokens[len(PROMPT) :]) for one in found.sequences[:20]] == [tokens for tokens, _ in wanted]
    scores = [one.cum_logprob for one in found.sequences[:20]]
    assert scores == pytest.approx([score for _, score in wanted], abs=1e-4)


def test_several_prompts_are_searched_each_for_itself(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=5)
    prompts = [PROMPT, [3, 4], "t8 t1"]
    together = llm.beam_search(prompts, params)
    alone = [llm.beam_search(prompt, params)[0] for prompt in prompts]
    assert [[s.tokens for s in out.sequences] for out in together] == [[s.tokens for s in o.sequences] for o in alone]
    assert [out.sequences[0].tokens[: len(p)] for out, p in zip(together[:2], prompts, strict=False)] == prompts[:2]


def test_the_end_is_shown_only_if_asked(llm: LLM) -> None:
    """Shown or not, it is in the beam's score."""
    hidden, shown = (
        llm.beam_search(PROMPT, BeamSearchParams(VOCAB, 1, include_stop_str_in_output=included))[0].sequences
        for included in (False, True)
    )
    ended = [i for i, one in enumerate(shown) if one.finish_reason == "stop"]
    assert sorted(shown[i].tokens[-1] for i in ended) == list(ENDS)
    assert [hidden[i].tokens for i in ended] == [PROMPT, PROMPT]
    assert [one.cum_logprob for one in hidden] == [one.cum_logprob for one in shown]


def test_a_prompt_without_room_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="context length"):
        llm.beam_search([PROMPT, [1] * 64], BeamSearchParams(beam_width=1, max_tokens=1))
