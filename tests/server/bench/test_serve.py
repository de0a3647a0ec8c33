"""`jaxserve bench serve` against a server over the fake engine."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from server.bench import serve
from server.cli import main
from tests.server.conftest import Live, make_service
from tests.server.fake_engine import FakeEngine

SHORT = ("--input-len", "12", "--output-len", "5", "--num-prompts", "6", "--ready-check-timeout-sec", "5")


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JAXSERVE_API_KEY", "VLLM_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def bench(server: Live, *words: str) -> int:
    return main(["bench", "serve", "--base-url", server.url, *words])


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["bench", "serve", *words])
    assert end.value.code == 2
    return capsys.readouterr().err.split("error: ", 1)[1]


@pytest.mark.parametrize("backend", ["openai", "vllm", "openai-chat"])
def test_counts_are_the_servers(live: Callable[..., Live], capsys, tmp_path: Path, backend: str) -> None:
    engine = FakeEngine()
    server = live(make_service(engine))
    saved = ("--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "r.json", "--metadata", "a=b=c")
    assert bench(server, "--backend", backend, *SHORT, "--ignore-eos", "--max-concurrency", "2", *saved) == 0
    found = json.loads((tmp_path / "r.json").read_text())
    prompt = 12 if backend != "openai-chat" else found["input_lens"][0]
    assert (found["completed"], found["failed"], found["model_id"], found["a"]) == (6, 0, "toy", "b=c")
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (6 * prompt, 30)
    assert found["output_lens"] == [5] * 6 and [len(text) for text in found["generated_texts"]] == [5] * 6
    assert 1 <= found["max_concurrent_requests"] <= 2
    assert found["request_throughput"] == pytest.approx(6 / found["duration"])
    assert len(engine.seen) == 7  # one to see whether it is ready
    assert engine.params[-1].temperature == 0 and engine.params[-1].ignore_eos
    assert "Total generated tokens:                  30" in capsys.readouterr().out


def test_a_sweep_has_a_file_for_each_rate_and_a_page(live, capsys, tmp_path: Path) -> None:
    server = live(make_service(FakeEngine()))
    told = (
        "--save-result",
        "--result-dir",
        str(tmp_path),
        "--result-filename",
        "r.json",
        "--plot",
        str(tmp_path / "load"),
    )
    assert bench(server, *SHORT, "--request-rates", "200", "inf", *told, "--num-warmups", "2") == 0
    assert json.loads((tmp_path / "r-200qps.json").read_text())["request_rate"] == 200.0
    assert json.loads((tmp_path / "r-infqps.json").read_text())["request_rate"] == "inf"
    assert (tmp_path / "load.html").read_text().count("<svg") == 4
    out, err = capsys.readouterr()
    assert out.count("Serving Benchmark Result") == 2
    assert "pip install matplotlib" in err or (tmp_path / "load.png").exists()


def test_each_rate_asks_something_else(live, tmp_path: Path) -> None:
    engine = FakeEngine()
    seen: list[bytes] = []
    check = engine._check
    engine._check = lambda prompt, *rest: (seen.append(bytes(prompt[1:])), check(prompt, *rest))[1]  # type: ignore[method-assign]
    assert bench(live(make_service(engine)), *SHORT, "--request-rates", "inf", "inf", "--num-warmups", "3") == 0
    assert len(seen) == 1 + 3 + 12
    assert len(set(seen)) == len(seen)


def test_errors_of_requests_are_counted_and_named(live, capsys) -> None:
    engine = FakeEngine(max_model_len=64)
    server = live(make_service(engine))
    words = ("--input-len", "60", "--output-len", "30", "--num-prompts", "3", "--ready-check-timeout-sec", "0")
    assert bench(server, *words) == 1
    out = capsys.readouterr().out
    assert "Successful requests:                     0" in out
    assert "Failed requests:                         3" in out
    assert "3 x status 400: " in out and "maximum context length" in out


def test_a_server_that_refuses_the_first_request_is_not_waited_for(live, capsys) -> None:
    server = live(make_service(FakeEngine(), api_key=("key",)))
    assert bench(server, *SHORT) == 1
    assert "error: the server names no model, name one with --model (status 401: " in capsys.readouterr().err
    assert bench(server, *SHORT, "--model", "toy", "--tokenizer", "nowhere/at/all") == 1
    assert "error: no tokenizer.json can be read from nowhere/at/all" in capsys.readouterr().err
    assert bench(server, *SHORT, "--model", "toy") == 1
    assert "error: the first request fails: status 401" in capsys.readouterr().err
    assert bench(server, *SHORT, "--api-key", "key") == 0
    assert bench(server, *SHORT, "--header", "Authorization=Bearer key") == 0


def test_a_server_that_is_not_there_or_not_ready_is_told(live, capsys) -> None:
    words = ("--num-prompts", "1", "--ready-check-timeout-sec", "0.1")
    assert main(["bench", "serve", "--port", "1", *words]) == 1
    assert "error: the server is not ready: no server answers at 127.0.0.1:1" in capsys.readouterr().err
    assert bench(live(make_service(None)), *words) == 1
    assert "error: the server is not ready: " in capsys.readouterr().err


def test_a_server_that_is_loading_is_waited_for(live, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_ASK_AGAIN_SECONDS", 0.02)
    service = make_service(None)
    server = live(service)
    timer = threading.Timer(0.1, lambda: setattr(service, "engine", FakeEngine()))
    timer.start()
    assert bench(server, *SHORT, "--model", "toy") == 0
    timer.join()
    out, err = capsys.readouterr()
    assert "Total input tokens:                      72" in out and "note" not in err


def test_fields_reach_the_server_and_the_extra_body_beats_them(live) -> None:
    engine = FakeEngine()
    given = ("--temperature", "0.5", "--top-p", "0.9", "--extra-body", '{"top_p": 0.25, "min_p": 0.125}')
    assert bench(live(make_service(engine)), *SHORT, *given) == 0
    params = engine.params[-1]
    assert (params.temperature, params.top_p, params.min_p) == (0.5, 0.25, 0.125)


def test_other_data_sets_and_a_ramp(live, tmp_path: Path, capsys) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "one", "output_tokens": 3}\n{"prompt": "three", "output_tokens": 4}\n')
    ramp = ("--ramp-up-strategy", "linear", "--ramp-up-start-rps", "100", "--ramp-up-end-rps", "300")
    server = live(make_service(FakeEngine()))
    words = (
        "--dataset-name",
        "custom",
        "--dataset-path",
        str(file),
        "--num-prompts",
        "2",
        *ramp,
        "--goodput",
        "ttft:9000",
    )
    assert bench(server, *words) == 0
    out = capsys.readouterr().out
    assert "Total generated tokens:                  7" in out
    assert "Total input tokens:                      10" in out
    assert "Request goodput (req/s):" in out
    file.write_text("nonsense")
    assert bench(server, *words) == 1
    assert "error: line 1 of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--request-rate", "0"), "must be above 0 or inf"),
        (("--request-rate", "1", "--request-rates", "2"), "give --request-rate or --request-rates"),
        (("--ramp-up-end-rps", "3"), "need --ramp-up-strategy"),
        (("--ramp-up-strategy", "linear"), "needs --ramp-up-start-rps and --ramp-up-end-rps"),
        (
            (
                "--ramp-up-strategy",
                "linear",
                "--ramp-up-start-rps",
                "1",
                "--ramp-up-end-rps",
                "2",
                "--request-rate",
                "1",
            ),
            "remove --request-rate",
        ),
        (("--goodput", "itl:5"), "--goodput takes ttft, tpot, e2el, got 'itl'"),
        (("--goodput", "ttft"), "--goodput takes NAME:VALUE, got 'ttft'"),
        (("--goodput", "ttft:fast"), "--goodput ttft takes milliseconds"),
        (("--percentile-metrics", "ttft,itt"), "--percentile-metrics takes ttft, tpot, itl, e2el, got 'itt'"),
        (("--metric-percentiles", "99,101"), "--metric-percentiles takes numbers in 0..100"),
        (("--extra-body", "[1]"), "must be a JSON object"),
        (("--metadata", "x"), "--metadata takes NAME=VALUE"),
        (("--base-url", "localhost"), "--base-url must look like"),
        (("--port", "99999"), "must look like http://127.0.0.1:8000, got http://127.0.0.1:99999"),
        (("--dataset-name", "custom"), "needs a file, --dataset-path"),
        (("--max-concurrency", "0"), "must be an integer of at least 1"),
        (("--backend", "tgi"), "invalid choice: 'tgi'"),
        (("--quux",), "unrecognized arguments: --quux"),
    ],
)
def test_mistakes_are_told(capsys, words: tuple[str, ...], told: str) -> None:
    found = refused(capsys, *words)
    assert told in found and found.count("\n") == 1
