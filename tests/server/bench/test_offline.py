"""`bench throughput` and `bench latency` over an engine that answers at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import pytest

import jaxserve
from jaxserve import CompletionOutput, EngineConfig, RequestOutput, SamplingParams
from jaxserve.llm import LLM
from server.cli import main
from tests.server.fake_engine import FakeTokenizer


class FakeLLM:
    """The names of `LLM` that the benches use."""

    made: list[FakeLLM]

    def __init__(self, **options: object) -> None:
        if options["model"] == "broken":
            raise ValueError("the model is no model; name another one")
        self.options, self.tokenizer = options, FakeTokenizer()
        self.batches: list[tuple[list[object], list[SamplingParams]]] = []
        self.made.append(self)

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closed = True

    def generate(
        self, prompts: Sequence[str | list[int]], params: SamplingParams | list[SamplingParams], *, use_tqdm: bool
    ) -> list[RequestOutput]:
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        self.batches.append((list(prompts), each))
        return [self._answer(prompt, p) for prompt, p in zip(prompts, each, strict=True)]

    def _answer(self, prompt: str | list[int], params: SamplingParams) -> RequestOutput:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        if params.max_tokens is not None and len(ids) + params.max_tokens > 200:
            raise ValueError("the prompt is too long")
        made = tuple(range(params.max_tokens or 0))
        return RequestOutput("0", None, tuple(ids), (CompletionOutput(0, "", made, None, None, "length", None),), True)


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch) -> list[FakeLLM]:
    FakeLLM.made = []
    monkeypatch.setattr(jaxserve, "LLM", FakeLLM, raising=False)
    return FakeLLM.made


def test_throughput_counts_what_came_back(engines: list[FakeLLM], capsys, tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    words = ("some/model", "--max-model-len", "1k", "--input-len", "20", "--output-len", "7", "--num-prompts", "5")
    assert main(["bench", "throughput", *words, "--seed", "3", "--output-json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert (found["num_requests"], found["total_num_tokens"], found["total_output_tokens"]) == (5, 135, 35)
    assert found["tokens_per_second"] * found["elapsed_time"] == pytest.approx(135)
    out = capsys.readouterr().out
    assert "total tokens/s" in out and "Total num prompt tokens:  100\nTotal num output tokens:  35\n" in out
    [llm] = engines
    assert (llm.options["model"], llm.options["max_model_len"], llm.options["seed"], llm.closed) == (
        "some/model", 1024, None, True,
    )  # fmt: skip
    assert all(p.ignore_eos and p.greedy for p in llm.batches[0][1])


def test_latency_measures_after_the_warm_up(engines: list[FakeLLM], capsys, tmp_path: Path) -> None:
    file = tmp_path / "l.json"
    words = (
        "--input-len",
        "9",
        "--output-len",
        "4",
        "--batch-size",
        "3",
        "--num-iters-warmup",
        "2",
        "--num-iters",
        "5",
    )
    assert main(["bench", "latency", *words, "--output-json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert len(found["latencies"]) == 5 and found["avg_latency"] == pytest.approx(sum(found["latencies"]) / 5)
    assert list(found["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    out = capsys.readouterr().out
    assert out.startswith("Avg latency: ") and "99% percentile latency: " in out
    [llm] = engines
    assert len(llm.batches) == 7
    assert {(len(prompts), len(prompts[0]), params[0].max_tokens) for prompts, params in llm.batches} == {(3, 9, 4)}  # type: ignore[arg-type]
    assert llm.batches[0][0] != llm.batches[1][0]


@pytest.mark.parametrize("command", ["throughput", "latency"])
def test_what_the_engine_refuses_is_told(capsys, command: str) -> None:
    assert main(["bench", command, "broken"]) == 1
    assert capsys.readouterr().err == "error: the model is no model; name another one\n"
    assert main(["bench", command, "--input-len", "190", "--output-len", "20"]) == 1
    assert capsys.readouterr().err.endswith("error: the prompt is too long\n")


@pytest.mark.parametrize("command", ["throughput", "latency"])
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--port", "1"), "unknown flag --port"),
        (("--max-model-length", "8"), "did you mean --max-model-len?"),
        (("--enforce-eager",), "is a flag of vLLM that jaxserve does not serve yet"),
        (("--dtype", "int8"), "invalid choice"),
        (("--max-num-seqs", "0"), "max_num_seqs must be an integer of at least 1"),
    ],
)
def test_mistakes_are_told(capsys, command: str, words: tuple[str, ...], told: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", command, *words])
    assert end.value.code == 2
    assert told in capsys.readouterr().err.split("error: ", 1)[1]


def test_a_launch_file_serves_here_too(engines: list[FakeLLM], tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("model: from/file\nport: 9001\nmax-num-seqs: 4\n")
    assert main(["bench", "latency", "--config", str(file), "--num-iters", "1", "--num-iters-warmup", "0"]) == 0
    assert (engines[0].options["model"], engines[0].options["max_num_seqs"]) == ("from/file", 4)


def test_the_real_engine_gets_the_configuration_of_the_flags(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_llm: LLM, config: EngineConfig, _observers: object) -> None:
        raise ValueError(f"got {config}")

    monkeypatch.setattr(LLM, "_start", start)
    monkeypatch.setattr(jaxserve, "LLM", LLM)
    assert main(["bench", "latency", "m", "--dtype", "float32", "--num-gpu-blocks-override", "9"]) == 1
    expected = EngineConfig(model="m", dtype="float32", num_pages=9)
    assert capsys.readouterr().err == f"error: got {expected}\n"
