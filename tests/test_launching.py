"""What the launcher decides and refuses before anything is compiled, and how an engine ends."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest

from jaxserve.config import EngineConfig, sampling_defaults
from jaxserve.device import memory
from jaxserve.device import mesh as meshes
from jaxserve.device.memory import Needs, Wishes
from jaxserve.grammar.constraint import Constraint
from jaxserve.launching import end_tokens, generation_config, launch, size
from jaxserve.observe import timeline
from jaxserve.plan import StepPlan, StepResult
from jaxserve.prompts import bad_word_tokens, tokens_of
from jaxserve.types import EngineDead, InvalidRequest, SamplingParams
from jaxserve.weights import source
from tests.device.engines import with_tokenizer
from tests.fake_executor import FakeExecutor, FakeFlight, Letters, continuation
from tests.grammar.vocabulary import constrained, grammar
from tests.models.cases import Case
from tests.worlds import BOUNDS, world

CHECKPOINT = Case("llama3").directory
TINY = {"max_num_seqs": 4, "block_size": 8, "num_pages": 60, "dtype": "float32"}

IMPOSSIBLE = [
    ({"max_num_batched_tokens": 2}, "max_num_batched_tokens 2 must be at least max_num_seqs 4"),
    ({"token_buckets": (8,), "max_num_batched_tokens": 16}, "must be the largest of token_buckets"),
    ({"token_buckets": (2,)}, "token_buckets must reach max_num_seqs 4"),
    ({"token_buckets": (8, 64), "deterministic": True}, "deterministic needs token_buckets of 64"),
    ({"max_model_len": 10**6}, "longer than the model's"),
    ({"num_pages": 3}, "set --max-model-len to 16 or less"),
    ({"chat_template": "/no/such/file.jinja"}, "chat"),
    ({"tensor_parallel_size": 64}, "needs as many devices"),
    ({"enable_chunked_prefill": False, "max_num_batched_tokens": 8}, "without chunked prefill"),
]


@pytest.mark.parametrize(("options", "message"), IMPOSSIBLE, ids=lambda x: str(x)[:40])
def test_impossible_options_are_refused_with_what_would_do(options: dict[str, object], message: str) -> None:
    config = EngineConfig(model=str(with_tokenizer(CHECKPOINT)), **{**TINY, **options})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        launch(config)


def test_auto_is_the_longest_that_the_pool_holds() -> None:
    needs = Needs(weights=0, state=0, temporary=0, page=1000, tokens=16, longest=4096)
    wishes = Wishes(pool=100_000, count=None, share=1.0, limit=None)
    longest = memory.longest_that_fits(needs, wishes)
    assert memory.pages(dataclasses.replace(needs, longest=longest), wishes) == longest // 16 + 1
    with pytest.raises(ValueError, match="set --max-model-len to"):
        memory.pages(needs, wishes)


@pytest.mark.parametrize("given", [{"served_model_name": 7}, {"token_buckets": (0,)}, {"seed": 1.5}])
def test_values_of_the_wrong_kind_name_their_field(given: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(given))):
        EngineConfig(**given)  # type: ignore[arg-type]


def test_a_prompt_dict_with_more_in_it_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="cache_salt"):
        tokens_of({"prompt": "x", "cache_salt": "s"}, Letters())  # type: ignore[typeddict-unknown-key]


def test_bad_words_that_leave_nothing_allowed_are_refused() -> None:
    word = Letters().encode("a", add_special_tokens=False)[0]
    with pytest.raises(InvalidRequest, match="nothing is left"):
        bad_word_tokens(SamplingParams(bad_words=["a"], allowed_token_ids=[word]), Letters(), BOUNDS)
    assert bad_word_tokens(SamplingParams(bad_words=["a"], allowed_token_ids=[word, word + 1]), Letters(), BOUNDS)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("shaped", [False, True])
def test_an_interrupted_step_is_read_again(monkeypatch: pytest.MonkeyPatch, shaped: bool, depth: int) -> None:
    """Ctrl-C while the host waits for the device loses nothing."""
    w = world(depth=depth)
    read, interrupts = FakeFlight.read, [KeyboardInterrupt]

    def interrupted(self: FakeFlight) -> StepResult:
        if interrupts:
            raise interrupts.pop()
        return read(self)

    monkeypatch.setattr(FakeFlight, "read", interrupted)
    letters = grammar("start: /[a-f]{9}/") if shaped else None
    w.add("a", [1, 2], grammar=letters, max_tokens=3, ignore_eos=True)
    with pytest.raises(KeyboardInterrupt):
        w.run()
    w.run()
    wanted = continuation([1, 2], 3) if letters is None else constrained([1, 2], 3, Constraint(letters))
    assert w.said["a.0"] == wanted


def test_a_step_that_cannot_be_launched_ends_the_engine() -> None:
    w = world()

    def broken(self: FakeExecutor, plan: StepPlan) -> FakeFlight:
        raise RuntimeError("out of order")

    w.device.launch = broken.__get__(w.device)  # type: ignore[method-assign]
    w.add("a", [1, 2], max_tokens=3)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of order"):
            w.engine.step()


def test_a_closed_engine_says_so() -> None:
    w = world()
    w.engine.close()
    with pytest.raises(EngineDead, match="closed"):
        w.add("a", [1, 2], max_tokens=3)


def test_prompt_logprobs_never_read_the_cache() -> None:
    w = world(page=4)
    for name in ("a", "b"):
        w.add(name, list(range(12)), max_tokens=1, prompt_logprobs=0, skip_reading_prefix_cache=False)
        w.run()
    assert [len(a.cached) for plan in w.device.steps for a in plan.admissions] == [0, 0]


def test_generation_config_directory_brings_its_own_end(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6], "temperature": 0.3}')
    config = EngineConfig(
        model=str(with_tokenizer(CHECKPOINT)), token_buckets=(64,), generation_config=str(tmp_path), **TINY
    )  # type: ignore[arg-type]
    launched = launch(config)
    assert launched.engine.bounds.eos == (5, 6) and launched.default_params == {"temperature": 0.3}
    launched.engine.close()


def test_a_start_ends_with_an_account_of_its_phases(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxserve.launching")
    launched = launch(EngineConfig(model=str(with_tokenizer(CHECKPOINT)), token_buckets=(64,), **TINY))  # type: ignore[arg-type]
    launched.engine.close()
    told = timeline.read(caplog.text)
    assert told is not None and told.cpu > 0
    phases = {phase.name: phase for phase in told.phases}
    beside = {"tokenizer", "grammars", "sizing the pool", "weights", "programs"}
    assert set(phases) == {"opening the model", "warming up", *beside}
    assert all(phases[name].begin >= phases["opening the model"].end for name in beside)
    assert phases["warming up"].begin >= max(phases["weights"].end, phases["programs"].end)


@pytest.mark.parametrize(
    ("chosen", "sampling", "eos"),
    [
        ("auto", {"temperature": 0.3}, (2, 7)),
        ("vllm", {}, (2, 7)),
        ("no-eos", {"top_k": 5}, (2, 7)),
        ("own-eos", {}, (4,)),
    ],
)
def test_where_sampling_defaults_and_ends_come_from(
    tmp_path: Path, chosen: str, sampling: dict[str, object], eos: tuple[int, ...]
) -> None:
    """Whatever is chosen for sampling, the checkpoint's list of ends stands unless it brings another."""
    configs = {
        "model": '{"eos_token_id": [2, 7], "temperature": 0.3}',
        "no-eos": '{"top_k": 5}',
        "own-eos": '{"eos_token_id": 4}',
    }
    for name, text in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "generation_config.json").write_text(text)
    for file in with_tokenizer(CHECKPOINT).iterdir():
        (tmp_path / "model" / file.name).symlink_to(file)
    checkpoint = source.open_checkpoint(tmp_path / "model")
    directory = str(tmp_path / chosen) if "-" in chosen else chosen
    found = generation_config(EngineConfig(generation_config=directory), checkpoint)
    assert sampling_defaults(found) == sampling
    assert end_tokens(found, checkpoint, tokenizer_end=None) == eos


@pytest.mark.parametrize("ways", [1, 2])
def test_one_row_is_sampled_as_one_only_where_native_kernels_multiply(ways: int):
    """XLA's products with few rows differ from those with many; on several devices all products are XLA's."""
    config = EngineConfig(model=str(CHECKPOINT), tensor_parallel_size=ways, **{**TINY, "max_num_seqs": 16})
    sized = size(config, source.open_checkpoint(CHECKPOINT), meshes.make(ways), None)
    kernels = sized.shapes.step.kernels
    native_products = ways == 1 and kernels is not None and kernels.rows >= 16
    assert sized.shapes.buckets.rows[0] == (1 if native_products else 4)
    plain = dataclasses.replace(config, cpu_kernels="xla")
    assert size(plain, source.open_checkpoint(CHECKPOINT), meshes.make(ways), None).shapes.buckets.rows[0] == 4
