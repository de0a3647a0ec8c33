"""Engines for measuring: weights that no checkpoint holds, and XLA's options from outside."""

from __future__ import annotations

import logging
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxserve import launching
from jaxserve.config import EngineConfig
from jaxserve.launching import Launched, launch
from jaxserve.types import Request, SamplingParams
from jaxserve.weights.checkpoint import LoadError
from jaxserve.weights.readers.description import Description
from tests.device.engines import with_tokenizer
from tests.models.cases import Case

TINY = {"max_num_seqs": 4, "token_buckets": (64,), "block_size": 8, "num_pages": 60, "dtype": "float32"}


def described(directory: Path) -> str:
    """The tiny Llama without its weights."""
    for file in with_tokenizer(Case("llama3").directory).iterdir():
        if file.suffix != ".safetensors":
            (directory / file.name).symlink_to(file.resolve())
    return str(directory)


def start(directory: Path, **options: object) -> Launched:
    return launch(EngineConfig(model=described(directory), load_format="dummy", **{**TINY, **options}))  # type: ignore[arg-type]


def test_weights_are_made_where_there_are_none(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        launched = start(tmp_path)
    assert "the weights are random" in caplog.text
    engine = launched.engine
    leaves = {jax.tree_util.keystr(p): np.asarray(a) for p, a in jax.tree_util.tree_leaves_with_path(launched.model)}
    qkv = next(array for path, array in leaves.items() if "qkv" in path)
    gain = next(array for path, array in leaves.items() if "norm1" in path)
    assert abs(qkv.std() * qkv.shape[-1] ** 0.5 - 1) < 0.1 and not np.array_equal(qkv[0], qkv[1])
    assert (gain == 1).all()
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    engine.add(Request("a", (1, 2, 3), params, None, 0))
    said: list[int] = []
    while engine.busy:
        for output in engine.step():
            said += output.outputs[0].token_ids
    engine.close()
    assert len(said) == 5


def test_a_description_holds_no_tensor(tmp_path: Path):
    description = Description.of_directory(Path(described(tmp_path)))
    assert not description.names() and description.config["architectures"] == ["LlamaForCausalLM"]
    for ask in (description.shape, description.dtype, description.read):
        with pytest.raises(LoadError, match="holds no tensor norm"):
            ask("norm")


def test_without_a_description_nothing_is_made(tmp_path: Path):
    with pytest.raises(LoadError, match=r"config\.json does not exist"):
        launch(EngineConfig(model=str(tmp_path), load_format="dummy"))


def test_compiler_options_reach_every_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[object] = []

    def compile_all(*_: object, options: object, **__: object):
        seen.append(options)
        raise RuntimeError("enough")

    monkeypatch.setattr(launching.programlib, "compile_all", compile_all)
    with pytest.raises(RuntimeError, match="enough"):
        start(tmp_path, compiler_options='{"xla_cmd_buffer_trace_cache_size": 64}')
    assert seen == [{"xla_cmd_buffer_trace_cache_size": 64}]


@pytest.mark.parametrize("options", [{"xla_no_such_thing": 1}, {"xla_gpu_enable_triton_gemm": "perhaps"}])
def test_options_that_xla_does_not_have_are_refused(tmp_path: Path, options: dict[str, object]):
    with pytest.raises(ValueError, match=r"compiler_options: .*xla_"):
        start(tmp_path, compiler_options=options)


@pytest.mark.parametrize("options", [{"optimise": True}, {"xla_gpu_enable_triton_gemm": [1]}, "fast", ["xla_x"]])
def test_what_no_xla_option_looks_like_is_refused(options: object):
    with pytest.raises(ValueError, match="compiler_options"):
        EngineConfig(compiler_options=options)  # type: ignore[arg-type]
