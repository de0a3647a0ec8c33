"""The gate: the engine's own programs, compiled for an H200 on any machine, keep every rule of `device/audit.py`.

And each rule is broken by a small program that is made for it, so that none of them passes whatever it is shown.
"""

from __future__ import annotations

import pytest

from tests.gpu_compile.conftest import Finding

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

RULES = (
    "no_weight_copies",
    "little_temporary",
    "pool_in_place",
    "fast_products",
    "no_host",
    "no_open_control",
    "planned_collectives",
    "no_spills",
)
FAMILIES = ("llama-3.1-8b", "qwen2.5-7b", "llama-3.1-70b")
FORWARDS = ("forward 1", "forward 16", "forward 256", "forward 2048")
SAMPLES = ("sample 1", "sample 16", "sample 256")
FULL_SAMPLES = ("sample 1 full", "sample 16 full", "sample 256 full")
PROGRAMS = (*FORWARDS, *SAMPLES, *FULL_SAMPLES)

SEARCH = "the search for top_k and top_p is a loop in a branch"
AWAITED: dict[tuple[str, str], str] = {
    **{("no_open_control", program): SEARCH for program in FULL_SAMPLES},
}
"""Rules that are known to be broken, and why. Whoever mends one deletes its line: a test that then passes says so."""

BROKEN = {
    "Triton multiplies": "fast_products",
    "weight is changed": "no_weight_copies",
    "weight is upcast": "fast_products",
    "large temporary": "little_temporary",
    "pool not donated": "pool_in_place",
    "pool not carried": "pool_in_place",
    "memory of the host": "no_host",
    "loop of unknown length": "no_open_control",
    "branch with a loop": "no_open_control",
    "gathers": "planned_collectives",
    "spills": "no_spills",
}


def _kept() -> list[object]:
    """Every rule for every program; those that are awaited are marked."""
    return [
        pytest.param(
            f"{family}: {program}",
            rule,
            marks=[pytest.mark.xfail(reason=AWAITED[rule, program])] if (rule, program) in AWAITED else [],
        )
        for family in FAMILIES
        for program in PROGRAMS
        for rule in RULES
    ]


@pytest.mark.parametrize(("program", "rule"), _kept())
def test_program_keeps_rule(evidence: dict[str, Finding], program: str, rule: str) -> None:
    assert evidence[program].faults[rule] == []


@pytest.mark.parametrize("program", FORWARDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_launches_few_kernels(evidence: dict[str, Finding], family: str, program: str) -> None:
    launches = evidence[f"{family}: {program}"].launches
    assert 4 <= launches["layer"] <= 36
    assert launches["graphs"] >= 1


@pytest.mark.parametrize("toy", ["good", "good on four"])
def test_a_good_program_breaks_nothing(evidence: dict[str, Finding], toy: str) -> None:
    assert evidence[f"toy: {toy}"].faults == {rule: [] for rule in RULES}


@pytest.mark.parametrize("toy", BROKEN)
def test_a_rule_finds_the_program_that_breaks_it(evidence: dict[str, Finding], toy: str) -> None:
    assert evidence[f"toy: {toy}"].faults[BROKEN[toy]] != []


def test_every_rule_can_fail() -> None:
    assert set(BROKEN.values()) == set(RULES)
