"""Beam search for one prompt of a request: every round is ordinary requests of one token to the engine.

Refuses what a search could not honour. How a search goes, `jaxserve.beam` knows.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from msgspec.structs import replace

from jaxserve.beam import Beam, BeamSearch, ask, check_width, next_logprobs
from jaxserve.types import BeamSearchParams, CompletionOutput, RequestOutput, SamplingParams
from server.errors import bad_request
from server.openai.logprobs import trimmed
from server.openai.merging import merged
from server.openai.protocol import SamplingFields
from server.service import Engine

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "stream": (False,),
    "temperature": (0, 1),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "stop": ([],),
    "stop_token_ids": ([],),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "prompt_logprobs": (),
}
"""What a search, which neither samples nor stops early, can do with other fields: the values that ask for nothing."""


def check(fields: SamplingFields, params: SamplingParams, engine: Engine) -> None:
    """Whether the request can be a beam search, if it asks for one; `params` are those of its prompts.

    Raises:
        ApiError: 400, a field has no place in a search.
        InvalidRequest: the search is too wide.
    """
    if not fields.use_beam_search:
        if fields.length_penalty not in (None, 1):
            raise bad_request("length_penalty needs use_beam_search: true", "length_penalty")
        return
    for name, neutral in _NEUTRAL.items():
        value: object = getattr(fields, name)
        if value is not None and value not in neutral:
            raise bad_request(f"{name} is not served together with use_beam_search: leave it out", name)
    shape = "response_format" if fields.structured_outputs is None else "structured_outputs"
    for name, value in ((shape, params.structured_outputs), ("thinking_token_budget", params.thinking_token_budget)):
        if value is not None:
            raise bad_request(f"{name} is not served together with use_beam_search", name)
    if params.prompt_logprobs is not None:
        raise bad_request("logprobs of an echo are not served together with use_beam_search", "logprobs")
    width = "n" if params.n == (fields.n or 1) else "best_of"
    check_width(_search_params(params, fields), engine.max_logprobs, width)


async def search(
    engine: Engine, name: str, prompt: Sequence[int], params: SamplingParams, fields: SamplingFields
) -> AsyncGenerator[RequestOutput]:
    """One output: the best `n` of `fields`, best first, of a search that is `n` of `params` wide.

    `name` is the engine's own for the prompt.
    """
    wanted = _search_params(params, fields)
    one = ask(wanted, params.logprobs or 0)
    found = BeamSearch(prompt, wanted, engine.eos_token_ids, engine.max_model_len - len(prompt))
    first = last = None
    rounds = 0
    while texts := found.texts():
        rounds += 1
        asked = [
            engine.generate(
                text, one, f"{name}-{rounds}-{i}", priority=fields.priority or 0, cache_salt=fields.cache_salt
            )
            for i, text in enumerate(texts)
        ]
        answers: dict[int, RequestOutput] = {}
        async with aclosing(merged(asked)) as outputs:
            async for i, output in outputs:
                answers[i] = last = output
        first = first or answers[0]
        found.advance([next_logprobs(answers[i]) for i in range(len(texts))])
    assert first is not None and last is not None
    best = found.beams()[: fields.n or 1]
    yield replace(
        first,
        request_id=name,
        prompt_token_ids=tuple(prompt),
        outputs=tuple(_choice(i, beam, params, engine) for i, beam in enumerate(best)),
        metrics=replace(first.metrics, last_token=last.metrics.last_token),
    )


def _search_params(params: SamplingParams, fields: SamplingFields) -> BeamSearchParams:
    assert params.max_tokens is not None
    try:
        return BeamSearchParams(
            beam_width=params.n,
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
            length_penalty=1.0 if fields.length_penalty is None else fields.length_penalty,
            include_stop_str_in_output=params.include_stop_str_in_output,
        )
    except ValueError as error:
        raise bad_request(str(error), str(error).split()[0]) from None


def _choice(index: int, beam: Beam, params: SamplingParams, engine: Engine) -> CompletionOutput:
    hidden = beam.ended and not params.include_stop_str_in_output
    shown = beam.tokens[:-1] if hidden else beam.tokens
    logprobs = None
    if params.logprobs is not None:
        logprobs = tuple(found or {} for found in trimmed(beam.logprobs, params.logprobs))
    return CompletionOutput(
        index=index,
        text=_text(shown, params, engine),
        token_ids=beam.tokens,
        cumulative_logprob=beam.cum_logprob,
        logprobs=logprobs,
        finish_reason=beam.finish_reason,
    )


def _text(tokens: Sequence[int], params: SamplingParams, engine: Engine) -> str:
    """As it follows the prompt."""
    hidden = engine.tokenizer.special_ids if params.skip_special_tokens else frozenset[int]()
    return b"".join(engine.tokenizer.token_bytes(t) for t in tokens if t not in hidden).decode("utf-8", "replace")
