"""From a request's fields to `SamplingParams`: the request's value, else the model's default, else OpenAI's."""

from __future__ import annotations

from collections.abc import Mapping

from jaxserve.types import OutputKind, SamplingParams, StructuredOutputsParams
from server.errors import bad_request
from server.openai import beams
from server.openai.protocol import SamplingFields
from server.service import Engine

MAX_STOP_STRINGS = 4
_FROM_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_PLAIN = (
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "allowed_token_ids",
    "bad_words",
    "prompt_logprobs",
)


def sampling_params(
    fields: SamplingFields,
    engine: Engine,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    logprobs_name: str,
    candidates: int | None = None,
    structured: StructuredOutputsParams | None = None,
    thinking_token_budget: int | None = None,
) -> SamplingParams:
    """The parameters of one prompt. `max_tokens` is at least 1; `logprobs_name` is the request's field.

    `candidates`: how many answers are computed, where it is not the `n` that is told.

    Raises:
        ApiError: 400, a value is out of range.
    """
    _check_stream(fields)
    _check_count("prompt_logprobs", prompt_logprobs, engine.max_logprobs)
    _check_count(logprobs_name, logprobs, engine.max_logprobs)
    if isinstance(fields.stop, list) and len(fields.stop) > MAX_STOP_STRINGS:
        raise bad_request(f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(fields.stop)}", "stop")
    given: dict[str, object] = {name: getattr(fields, name) for name in _PLAIN}
    given |= {name: _first(getattr(fields, name), engine.default_params.get(name)) for name in _FROM_MODEL}
    given |= {
        "n": fields.n if candidates is None else candidates,
        "max_tokens": max_tokens,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "logit_bias": _bias(fields.logit_bias),
        "structured_outputs": structured,
        "thinking_token_budget": thinking_token_budget,
        "output_kind": OutputKind.DELTA if fields.stream else OutputKind.FINAL_ONLY,
    }
    try:
        params = SamplingParams(**{k: v for k, v in given.items() if v is not None})  # type: ignore[arg-type]
    except ValueError as error:
        message = str(error)
        raise bad_request(message, message.split()[0]) from None
    beams.check(fields, params, engine)
    return params if params.top_k <= engine.vocab_size else params.clone(top_k=0)


def _check_stream(fields: SamplingFields) -> None:
    if fields.stream_options is not None and not fields.stream:
        raise bad_request("stream_options needs stream: true", "stream_options")
    if fields.prompt_logprobs is not None and fields.stream:
        raise bad_request("prompt_logprobs cannot be streamed: leave out stream", "prompt_logprobs")


def _check_count(name: str, value: int | None, most: int) -> None:
    if value is None:
        return
    if value < -1 or (value == -1 and most != -1):
        raise bad_request(f"{name} must be at least 0, got {value}", name)
    if most != -1 and value > most:
        raise bad_request(f"{name} must be at most {most} (--max-logprobs), got {value}", name)


def _bias(given: Mapping[str, float] | None) -> dict[int, float] | None:
    """Token ids from JSON's strings; values within [-100, 100], as OpenAI defines them."""
    if not given:
        return None
    found: dict[int, float] = {}
    for key, value in given.items():
        if not key.isascii() or not key.removeprefix("-").isdigit() or len(key) > 20:
            raise bad_request(f"logit_bias keys must be token ids, got {key[:100]!r}", "logit_bias")
        found[int(key)] = min(max(value, -100.0), 100.0)
    return found


def _first(given: object, default: object) -> object:
    return default if given is None else given
