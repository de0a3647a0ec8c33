"""Drives transformers' `generate`: one request after the other (`single`), in batches of 16 that wait for their longest
answer (`static16`), or with its continuous batching (`continuous`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from transformers import (  # pyright: ignore[reportMissingImports]
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
)
from transformers.utils import logging  # pyright: ignore[reportMissingImports]

from benchmarks.peers.driver import Answer, Answered, Request, Setting, drive

BATCH = {"single": 1, "static16": 16}
PAGE, BATCH_TOKENS = 256, 1024


def start(setting: Setting) -> Answer:
    logging.disable_progress_bar()
    torch.set_num_threads(setting.threads)
    model = AutoModelForCausalLM.from_pretrained(setting.model, dtype="auto").eval()
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    if setting.variant == "continuous":
        return _together(model, setting)
    size = BATCH[setting.variant]

    def answer(requests: Sequence[Request]) -> Answered:
        batches = [requests[i : i + size] for i in range(0, len(requests), size)]
        return Answered([tokens for batch in batches for tokens in _batch(model, batch)])

    return answer


def _batch(model: transformers.PreTrainedModel, batch: Sequence[Request]) -> list[list[int]]:
    """Padded on the left; each answer counts as far as it was asked for."""
    width = max(len(prompt) for prompt, _ in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, (prompt, _) in enumerate(batch):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    longest = max(count for _, count in batch)
    made = model.generate(ids, attention_mask=mask, max_new_tokens=longest)[:, width:].tolist()
    return [tokens[:count] for tokens, (_, count) in zip(made, batch, strict=True)]


def _together(model: transformers.PreTrainedModel, setting: Setting) -> Answer:
    """Its cache and its batches are bounded, as by itself it takes most of the memory that is free."""
    bounds = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=setting.sequences * setting.length // PAGE,
        max_batch_tokens=BATCH_TOKENS,
        max_requests_per_batch=setting.sequences,
    )
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    manager = model.init_continuous_batching(greedy, bounds)
    manager.start()

    def answer(requests: Sequence[Request]) -> Answered:
        names = [manager.add_request(prompt, max_new_tokens=count, eos_token_id=-1) for prompt, count in requests]
        found: dict[str, list[int]] = {}
        while len(found) < len(names):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                found[result.request_id] = list(result.generated_tokens)
            elif result is None and not manager.is_running():
                raise RuntimeError("its continuous batching has stopped")
        return Answered([found[name] for name in names])

    return answer


if __name__ == "__main__":
    drive(start)
