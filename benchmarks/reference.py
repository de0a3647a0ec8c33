"""The plain loop to compare with: transformers' `generate`, one request at a time. `offline.py` starts it.

    python reference.py MODEL_DIRECTORY < requests.json > answers.json

Needs torch and transformers only, in an environment of their own; nothing of jaxserve. Each request is a list of
prompt tokens and a number of tokens to answer, whatever they are; the model runs in the dtype of its directory.
"""

from __future__ import annotations

import json
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
    begin, cpu = time.perf_counter(), time.process_time()
    answers = [answer(prompt, count) for prompt, count in requests]
    took = {"seconds": time.perf_counter() - begin, "cpu": time.process_time() - cpu}
    setting = {"threads": torch.get_num_threads(), "dtype": str(model.dtype)}
    json.dump({"answers": answers, **took, **setting}, sys.stdout)


if __name__ == "__main__":
    main()
