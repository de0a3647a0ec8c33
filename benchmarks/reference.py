"""The plain loop to compare with: transformers' `generate`, one request at a time. `offline.py` starts it.

    python reference.py MODEL_DIRECTORY < requests.json > answers.json

Needs torch and transformers only, in an environment of their own; nothing of jaxserve. Each request is a list of
prompt tokens and a number of tokens to answer, whatever they are; the model runs in the dtype of its directory.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging


def main() -> None:
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto").eval()
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)

    def answer(prompt: list[int], count: int) -> list[int]:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count)
        return out[0, len(prompt) :].tolist()

    answer([0] * 32, 4)  # what only the first call pays for
    requests = json.load(sys.stdin)
    begin = time.perf_counter()
    answers = [answer(prompt, count) for prompt, count in requests]
    seconds = time.perf_counter() - begin
    threads = min(torch.get_num_threads(), os.cpu_count() or 1)
    json.dump({"seconds": seconds, "answers": answers, "threads": threads, "dtype": str(model.dtype)}, sys.stdout)


if __name__ == "__main__":
    main()
