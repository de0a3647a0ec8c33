"""Drives OpenVINO GenAI's `ContinuousBatchingPipeline`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import openvino as ov  # pyright: ignore[reportMissingImports]
import openvino_genai as genai  # pyright: ignore[reportMissingImports]

from benchmarks.peers.driver import POOL_GIB, Answer, Answered, Request, Setting, drive

PRECISIONS = {"bf16": "bf16", "f32": "f32", "int8": "bf16"}
"""Of products and KV (which it would quantise by itself); the weights are as the model's files have them."""


def start(setting: Setting) -> Answer:
    scheduling = genai.SchedulerConfig()
    scheduling.max_num_seqs = setting.sequences
    scheduling.cache_size = POOL_GIB
    scheduling.enable_prefix_caching = setting.caching
    pipeline = genai.ContinuousBatchingPipeline(
        setting.model,
        scheduling,
        "CPU",
        {
            "INFERENCE_NUM_THREADS": setting.threads,
            "INFERENCE_PRECISION_HINT": PRECISIONS[setting.precision],
            "KV_CACHE_PRECISION": PRECISIONS[setting.precision],
            "CACHE_DIR": setting.compiled,
        },
    )

    def answer(requests: Sequence[Request]) -> Answered:
        prompts = [ov.Tensor(np.array([prompt], np.int64)) for prompt, _ in requests]
        configs = [genai.GenerationConfig(max_new_tokens=count, ignore_eos=True) for _, count in requests]
        results = pipeline.generate(prompts, configs)
        return Answered([list(result.m_generation_ids[0]) for result in results])

    return answer


if __name__ == "__main__":
    drive(start)
