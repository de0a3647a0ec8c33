"""`jaxserve plan`: its figures against a running engine and the literature, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxserve import chips
from jaxserve.chips import Device, can_compile
from jaxserve.config import EngineConfig
from jaxserve.device import mesh as meshes
from jaxserve.device import programs
from jaxserve.forecast import Forecast, describe
from jaxserve.launching import launch, size
from jaxserve.models.known import CONFIGS
from jaxserve.weights.readers.description import Description
from tests.models.cases import Case

ROOT = Path(__file__).parents[1]
FEWEST = ("--token-buckets", "16", "--max-num-seqs", "16")
LLAMA_13B = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "float16",
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "max_position_embeddings": 2048,
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
DEVICES = {
    "llama-3.1-8b": "b200",
    "llama-3.1-70b-4gpu": "h200x4",
    "qwen2.5-7b": "h100",
    "qwen2.5-1.5b": "a100-80g",
}
"""Every launch file for GPUs, each on another kind."""


def plan(*words: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, which it prepares for the device."""
    environment = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    return subprocess.run(
        [Path(sys.executable).with_name("jaxserve"), "plan", *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_is_what_the_running_engine_allocates() -> None:
    """The demo model, on the CPU."""
    config = EngineConfig(
        max_model_len=512, token_buckets=(16,), max_num_seqs=4, num_pages=300, compilation_cache_dir=""
    )
    found = Forecast.of(config, Device("cpu", 1))
    before = sum(a.nbytes for a in jax.live_arrays())
    launched = launch(config)
    allocated = sum(a.nbytes for a in jax.live_arrays()) - before
    launched.engine.close()
    assert abs(found.allocated / allocated - 1) < 0.05
    assert found.tokens == 299 * 16 and found.pool == 300 * 16 * found.token


def test_a_sequence_of_llama_13b_keeps_as_much_as_the_literature_says() -> None:
    """Up to 1.7 GB for one sequence, says the announcement of vLLM (June 2023); the model takes 2,048 tokens."""
    config = EngineConfig(model="13b", num_pages=200, max_num_seqs=1, max_num_batched_tokens=16)
    sized = size(config, Description(LLAMA_13B, "test"), meshes.make(1), None)
    sequence = programs.nbytes(sized.shapes.kv) / 200 / config.block_size * 2048
    assert round(sequence / 1e9, 1) == 1.7


def test_what_cannot_fit_is_refused_with_what_would_do() -> None:
    model = "meta-llama/Llama-3.1-70B-Instruct"
    config = EngineConfig(model=model, max_model_len=8192)
    with pytest.raises(ValueError, match=r"weights .* do not fit .* set --tensor-parallel-size to 2 or more"):
        size(config, Description(CONFIGS[model], model), meshes.make(1), int(0.92 * chips.chips()["h200"].memory))


def test_a_pool_that_cannot_hold_a_sequence_is_refused() -> None:
    config = EngineConfig(model=str(Case("llama3").directory), block_size=8, num_pages=3, max_num_seqs=1)
    with pytest.raises(ValueError, match="set --max-model-len to 16 or less"):
        size(config, describe(config), meshes.make(1), None)


def test_a_directory_with_a_config_is_enough(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_13B))
    assert describe(EngineConfig(model=str(tmp_path))).config["hidden_size"] == 5120


def test_an_unknown_model_says_what_to_give() -> None:
    with pytest.raises(ValueError, match=r"directory with its config\.json .* meta-llama/Llama-3\.1-8B-Instruct"):
        describe(EngineConfig(model="nobody/nothing-7b"))


@pytest.mark.parametrize("text", ["h300", "h200x0", "x4", "", "h200 x4"])
def test_devices_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"device must be one of a100-80g, h100, h200, b200, cpu"):
        Device.named(text)


def test_devices() -> None:
    assert Device.named("H200x4") == Device("h200", 4)
    assert Device.named("cpu") == Device("cpu", None) and Device.named("cpu").chip is None


def test_without_the_compiler_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(chips, "WHEELS", tmp_path / "none")
    monkeypatch.setattr(chips, "_PLUGIN", "no_such_package")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(ValueError, match=r"NVIDIA H200 needs CUDA's compiler .* `make gpu-compile`"):
        chips.prepare(Device("h200", 1), 1)


def test_another_number_of_devices_is_refused() -> None:
    done = plan("--device", "cpux2", "--max-model-len", "64")
    assert (done.returncode, done.stdout) == (1, "")
    assert "device names 2 devices, tensor_parallel_size 1" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_launch_file_for_a_cpu() -> None:
    done = plan("--config", "configs/smollm2-cpu.yaml", "--device", "cpu", *FEWEST, "--max-num-batched-tokens", "16")
    assert done.returncode == 0, done.stderr
    for line in ("smollm2-135m-instruct on 1 x this machine's CPU", "tokens of 23,040 bytes", "of   2,048 tokens"):
        assert line in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not can_compile(), reason="CUDA's compiler is not installed; `make gpu-compile` installs it")
@pytest.mark.parametrize("name", DEVICES)
def test_every_launch_file_for_a_gpu(name: str) -> None:
    done = plan("--config", f"configs/{name}.yaml", "--device", DEVICES[name], *FEWEST, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["estimated"] == (not DEVICES[name].startswith("h200"))
    parts = sum(found[part] for part in ("weights", "state", "temporary", "reserve", "pool"))
    assert 0.9 * found["usable"] < parts <= found["usable"]
    chip = chips.chips()[DEVICES[name].partition("x")[0]]
    last = found["steps"][-1]
    assert last["bound"] == "memory" and last["batch"] == 16
    assert last["seconds"] == pytest.approx(last["moved"] / chip.bandwidth)
    assert 0.8 * found["weights"] < last["moved"] - 16 * 2048 * found["token"] < 1.25 * found["weights"]


def test_every_launch_file_is_planned_for() -> None:
    assert {file.stem for file in (ROOT / "configs").iterdir()} == {*DEVICES, "smollm2-cpu"}
