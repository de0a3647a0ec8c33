"""Every launch file in configs/ is read the way the server reads it, and every option in it is explained."""

from pathlib import Path

import pytest

from jaxserve.config import EngineConfig, ServerConfig, read_yaml, split

FOLDER = Path(__file__).parents[1] / "configs"

STATED: dict[str, dict[str, object]] = {
    "smollm2-cpu": {"model": "smollm2-135m-instruct", "kv_cache_memory_bytes": 512 * 1024**2},
    "llama-3.1-8b": {"model": "meta-llama/Llama-3.1-8B-Instruct", "tensor_parallel_size": 1, "max_model_len": "auto"},
    "llama-3.1-70b-4gpu": {
        "model": "meta-llama/Llama-3.1-70B-Instruct",
        "tensor_parallel_size": 4,
        "max_model_len": 8192,
        "gpu_memory_utilization": 0.90,
    },
    "qwen2.5-7b": {"model": "Qwen/Qwen2.5-7B-Instruct", "max_model_len": 16384},
    "qwen2.5-1.5b": {"model": "Qwen/Qwen2.5-1.5B-Instruct", "tensor_parallel_size": 1},
}


def test_every_launch_file_is_stated_here():
    assert {file.stem for file in FOLDER.iterdir()} == set(STATED)


@pytest.mark.parametrize("name", STATED)
def test_launch_file_loads(name: str):
    engine, server = split(read_yaml(FOLDER / f"{name}.yaml"))
    assert isinstance(engine, EngineConfig)
    assert isinstance(server, ServerConfig)
    assert {option: getattr(engine, option) for option in STATED[name]} == STATED[name]


@pytest.mark.parametrize("name", STATED)
def test_every_option_is_explained_on_its_line(name: str):
    lines = (FOLDER / f"{name}.yaml").read_text().splitlines()
    options = [line for line in lines if line and not line.startswith("#")]
    assert [line for line in options if "  # " not in line] == []
    assert all(len(line) <= 120 for line in lines)
