"""Drives jaxserve's `LLM`."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.peers.driver import Answer, Answered, Request, Setting, drive
from jaxserve import LLM, SamplingParams

DTYPES = {"bf16": "bfloat16", "f32": "float32", "int8": "bfloat16"}


def options(setting: Setting) -> dict[str, str | int | bool | None]:
    """Of the engine, besides its model."""
    return {
        "dtype": DTYPES[setting.precision],
        "quantization": "int8" if setting.precision == "int8" else None,
        "max_num_seqs": setting.sequences,
        "max_model_len": setting.length,
        "enable_prefix_caching": setting.caching,
        "compilation_cache_dir": setting.compiled,
        "on_recompile": "error",
    }


def start(setting: Setting) -> Answer:
    llm = LLM(setting.model, observers=(), **options(setting))

    def answer(requests: Sequence[Request]) -> Answered:
        params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for _, count in requests]
        outputs = llm.generate([prompt for prompt, _ in requests], params, use_tqdm=False)
        computed = sum(len(output.prompt_token_ids) - output.num_cached_tokens for output in outputs)
        return Answered([list(output.outputs[0].token_ids) for output in outputs], computed)

    return answer


if __name__ == "__main__":
    drive(start)
