"""What the GPU benchmark keeps of its parts, however they end; the table; gaps in a trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu.gaps import idle
from benchmarks.gpu.parts import Part, run
from benchmarks.gpu.record import ALONE, COPY, CROWD, PRODUCT, Aim, Done, Piece, Record, Row, table, together
from benchmarks.gpu.sizes import FULL

MODULE = "tests.benchmarks.gpu_parts"
VERSIONS = {"driver": "1", "jax": "0.11.2"}


@pytest.mark.parametrize(
    ("argument", "seconds", "state", "reason", "rows"),
    [
        ("well", 60, "done", "", ["first", "last"]),
        ("slow", 3, "cut", "its time ran out", ["first"]),
        ("wrong", 60, "failed", "RuntimeError: ValueError: it cannot be measured", ["first", "last"]),
        ("nothing", 60, "skipped", "there is nothing to measure", []),
    ],
)
def test_what_a_part_found_is_kept(
    tmp_path: Path, argument: str, seconds: float, state: str, reason: str, rows: list[str]
):
    done = run(Part("one", MODULE, seconds, argument), tmp_path, toy=True, seconds=seconds)
    assert (done.state, done.reason, [row.name for row in done.rows]) == (state, reason, rows)
    record = Record("toy", "CPU", VERSIONS, ["today"], {"one": done})
    record.save(tmp_path / "results.json")
    assert Record.load(tmp_path / "results.json") == record


def test_a_later_run_keeps_what_it_did_not_find_again():
    earlier = Done("cut", 9.0, "its time ran out", (Row("a", 1.0, "s"), Row("b", 1.0, "s")))
    cut = together(earlier, Done("cut", 5.0, "its time ran out", (Row("b", 2.0, "s"),)))
    assert [(row.name, row.value) for row in cut.rows] == [("a", 1.0), ("b", 2.0)]
    whole = Done("done", 5.0, rows=(Row("b", 2.0, "s"),))
    assert together(earlier, whole) == whole and together(None, cut) == cut


def test_another_card_or_version_is_another_record():
    record = Record("full", "NVIDIA H200", VERSIONS)
    assert record.same_machine(Record("full", "NVIDIA H200", {**VERSIONS, "driver": "2"}))
    assert not record.same_machine(Record("full", "NVIDIA H100", VERSIONS))
    assert not record.same_machine(Record("full", "NVIDIA H200", {**VERSIONS, "jax": "0.12"}))


def test_the_table_compares_with_roofline_aims_and_transformers():
    decode = Row("a token, batch 1", 5.0, "ms", 0.005, (Piece(bytes=16e9, flops=16e9),))
    rows = (Row(COPY, 4000.0, "GB/s"), Row(PRODUCT, 800.0, "TFLOP/s"), decode)
    rows += (Row(CROWD, 9000.0, "tokens/s"), Row(ALONE, 30.0, "tokens/s"))
    record = Record("full", "NVIDIA H200", VERSIONS, ["today"], {"all": Done("cut", 8.0, "its time ran out", rows)})
    lines = table(record).splitlines()
    assert any("a token, batch 1" in line and " 80%" in line and "<= 4.2 MISSED" in line for line in lines)
    assert any(CROWD in line and ">= 8000 met" in line for line in lines)
    assert any("crowd over transformers" in line and " 300 x" in line and ">= 24 met" in line for line in lines)
    assert any("all " in line and "cut after 8 s" in line for line in lines)


def test_aims():
    assert Aim(at_most=4.2).met(4.2) and not Aim(at_most=4.2).met(4.3)
    assert Aim(at_least=24).met(24) and not Aim(at_least=24).met(23)


def test_the_least_of_llama_3_1_8b():
    model = FULL.model
    assert model.layer_weights + 2 * model.head_weights == pytest.approx(8.03e9, rel=1e-3)
    assert model.kv_token_bytes == 128 * 1024
    step = model.decoding(32, 1024)
    assert step.bytes == pytest.approx(15.0e9 + 32 * 1025 * 131072, rel=1e-2)
    assert model.entering(1, 2048).flops == pytest.approx(2 * 2048 * model.layer_weights, rel=0.05)


def test_gaps_of_overlapping_work():
    found = idle([(0.0, 1.0), (0.5, 0.8), (1.000005, 2.0), (2.1, 2.2)])
    assert found.busy == pytest.approx(2.1 - 5e-6)
    assert found.between_kernels == pytest.approx(5e-6)
    assert found.waiting == pytest.approx(0.1)
