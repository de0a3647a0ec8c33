"""transformers' `generate` on the same model and the same GPU: one request at a time, greedy.

Few tokens are enough: the time to the first one and the time for each after it make up the time of a whole answer.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Iterator
from types import ModuleType

from benchmarks.gpu.parts import Skip, Work
from benchmarks.gpu.record import ALONE, Row
from benchmarks.gpu.sizes import Size


def measure(size: Size, work: Work, argument: str) -> Iterator[Row]:
    try:
        torch = importlib.import_module("torch")
    except ModuleNotFoundError:
        raise Skip("torch is not installed here") from None
    if size.name == "full" and not torch.cuda.is_available():
        raise Skip("torch sees no GPU here")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = _model(size, torch, device)
    crowd = size.crowd
    prompt = torch.randint(0, size.model.vocab, (1, crowd.prompt), device=device)

    def seconds(tokens: int) -> float:
        begin = time.perf_counter()
        answer = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, min_new_tokens=tokens,
            do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        if answer.shape[1] != crowd.prompt + tokens:
            raise RuntimeError(f"{tokens} tokens were asked for, {answer.shape[1] - crowd.prompt} came")
        answer.cpu()
        return time.perf_counter() - begin

    seconds(2)
    first = statistics.median(seconds(1) for _ in range(size.repeats))
    each = (seconds(size.reference_tokens) - first) / (size.reference_tokens - 1)
    yield Row("transformers: first token", first * 1e3, "ms", note=f"prompt of {crowd.prompt}")
    yield Row("transformers: a token after it", each * 1e3, "ms", note=f"{size.reference_tokens} tokens")
    whole = first + (crowd.answer - 1) * each
    note = f"{crowd.prompt} / {crowd.answer}, from the two above"
    yield Row(ALONE, crowd.answer / whole, "tokens/s", note=note)


def _model(size: Size, torch: ModuleType, device: str):
    """With random weights in bfloat16, made on the device."""
    transformers = importlib.import_module("transformers")
    config = transformers.AutoConfig.for_model(**size.model.config())
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
