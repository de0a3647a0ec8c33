"""`bench startup`: what is made of a start, and a server over the fake engine that is really started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from jaxserve.observe.timeline import Phase, Told
from server.bench.command import BenchError
from server.bench.startup import OPENING, Stage, Start, Starter, lines, measure, record, stages
from server.cli import main

ROOT = Path(__file__).parents[3]
SERVER = """
import argparse, pathlib, sys, time
sys.path.insert(0, sys.argv[1])
from jaxserve.config import EngineConfig, ServerConfig
from server.serving import Started, serve
from tests.server.fake_engine import FakeEngine

parser = argparse.ArgumentParser()
for name in ("--host", "--compilation-cache-dir", "--fail"):
    parser.add_argument(name)
parser.add_argument("--port", type=int)
given = parser.parse_args(sys.argv[2:])

def start(config, *, progress, observers):
    cache = pathlib.Path(given.compilation_cache_dir, "program")
    progress("opening the model", 0.0)
    if given.fail:
        raise ValueError("the model is no model; name another one")
    progress("compiling a", 0.0)
    if not cache.exists():
        time.sleep(0.2)
        cache.write_text("compiled")
    progress("compiling b", 0.5)
    progress("loading weights", 0.5)
    return Started(FakeEngine(), config)

sys.exit(serve(EngineConfig(served_model_name=("toy",)), ServerConfig(host=given.host, port=given.port), start))
"""


def starter(*words: str) -> Starter:
    return Starter(words, "toy", (), 30.0, (sys.executable, "-P", "-c", SERVER, str(ROOT)))


def test_a_cold_and_a_warm_start() -> None:
    found = measure(starter(), cold=1, warm=1)
    [cold], [warm] = found["cold"], found["warm"]
    assert list(cold.stages) == ["listening", "opening the model", "compiling", "loading weights"]
    assert 0 < cold.ready < cold.first_token
    times = {kind: stages([start])["compiling"] for kind, start in (("cold", cold), ("warm", warm))}
    spent = {kind: end - begin for kind, (begin, end) in times.items()}
    assert spent["cold"] > 0.15 and spent["cold"] > spent["warm"]


def test_a_server_that_does_not_start_is_told(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="ended with status 1: error: the model is no model; name another one"):
        starter("--fail", "yes").start(tmp_path)


def start(ready: float, **spans: tuple[float, float]) -> Start:
    return Start({name: Stage(*span) for name, span in spans.items()}, ready, ready + 1)


STARTS = [
    start(9.0, listening=(0, 1), opening=(2, 2), loading=(3, 4), compiling=(3.5, 7)),
    start(10.0, listening=(0, 1), opening=(2, 2), loading=(3, 6), compiling=(3.5, 8)),
    start(12.0, listening=(0, 3), opening=(4, 4), loading=(5, 8), compiling=(5.5, 11)),
]


def test_stages_are_medians_and_have_no_gaps_between_them() -> None:
    assert stages(STARTS) == {
        "listening": (0, 2),
        "opening": (2, 3),
        "loading": (3, 6),
        "compiling": (3.5, 10.0),
    }


def test_what_the_engine_tells_beats_what_is_seen() -> None:
    told = Told((Phase("opening", 0.1, 0.4), Phase("weights", 0.3, 2.5)), 4.2)
    seen = {
        "listening": Stage(0, 1),
        "importing jax": Stage(1, 1),
        OPENING: Stage(2, 2),
        "loading weights": Stage(3, 3),
    }
    starts = [Start(seen, 5.0, 6.0, told)]
    assert stages(starts) == {
        "listening": (0, 1),
        "importing jax": (1, 2),
        "opening": (2.1, 2.4),
        "weights": (2.3, 4.5),
    }
    assert lines("warm", starts)[3].split() == ["CPU", "until", "ready", "(s):", "4.20"]
    assert record("warm", starts)["warm_cpu_times"] == [4.2]


def test_the_table_and_the_record() -> None:
    told = lines("cold", STARTS)
    assert told[1:3] == [f"{'Ready (s):':<40} 10.00", f"{'First token (s):':<40} 11.00"]
    assert told[-2].split() == ["first", "token", "10.00", "11.00", "1.00"]
    found = record("cold", STARTS)
    assert (found["median_cold_startup_time"], found["cold_startup_times"]) == (10.0, [9.0, 10.0, 12.0])
    assert found["median_cold_first_token_time"] == 11.0
    assert found["cold_stages"]["compiling"] == [3.5, 10.0]  # type: ignore[index]
    assert record("warm", []) == {}


@pytest.mark.parametrize("flag", ["--port=9", "--host=x", "--compilation_cache_dir=x", "--uds=x"])
def test_what_the_bench_chooses_is_refused(capsys, flag: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", "startup", flag])
    assert end.value.code == 2
    assert "is what this bench chooses; remove it" in capsys.readouterr().err
