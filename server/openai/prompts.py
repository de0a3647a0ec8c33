"""From what a request says to token ids: plain prompts, and the room that is left for an answer.

Long texts are tokenised in a thread, so that other requests go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from server.errors import ApiError, bad_request
from server.openai.protocol import CompletionRequest, SamplingFields
from server.service import Engine, Service

MAX_PROMPTS = 1024
INLINE_CHARACTERS = 4000
"""Texts up to this length are tokenised at once: about a millisecond."""
MAX_CHARACTERS = 4_000_000
"""Of a text that is only tokenised, unless the model's context may hold more: a few seconds."""
MAX_TOKENS = 500_000
"""That are only made a text: decoding holds everybody up."""


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: list[int]
    text: str | None
    """As it was given; None if token ids were, or if it was truncated."""


async def completion_prompts(request: CompletionRequest, service: Service) -> list[Prompt]:
    """One prompt an entry.

    Raises:
        ApiError: 400, an empty or mixed prompt.
    """
    engine = service.ready()
    given = request.prompt
    if isinstance(given, str):
        entries: Sequence[str | list[int]] = [given]
    elif given and all(isinstance(entry, int) for entry in given):
        entries = [[entry for entry in given if isinstance(entry, int)]]
    elif given and all(isinstance(entry, str) for entry in given):
        entries = [entry for entry in given if isinstance(entry, str)]
    elif given and all(isinstance(entry, list) for entry in given):
        entries = [entry for entry in given if isinstance(entry, list)]
    else:
        what = "must not mix strings, token ids and lists" if given else "must not be empty"
        raise bad_request(f"prompt {what}", "prompt")
    if len(entries) > MAX_PROMPTS:
        raise bad_request(f"prompt takes at most {MAX_PROMPTS} prompts, got {len(entries)}", "prompt")
    special = request.add_special_tokens is not False
    for entry in entries:
        if isinstance(entry, str) and request.truncate_prompt_tokens is None:
            check_length(entry, service, "prompt")
    size = sum(len(entry) for entry in entries)
    prompts = await maybe_in_thread(service, size, lambda: [_prompt(entry, engine, special) for entry in entries])
    if not all(prompt.ids for prompt in prompts):
        raise bad_request("prompt must not be empty", "prompt")
    return prompts


async def encode(text: str, service: Service, *, special: bool) -> list[int]:
    """Token ids of a text, which may be longer than the model's context.

    Raises:
        ApiError: 400, it is far longer.
    """
    tokenizer = service.ready().tokenizer
    if len(text) > MAX_CHARACTERS:
        check_length(text, service, "prompt")
    return await maybe_in_thread(service, len(text), lambda: tokenizer.encode(text, add_special_tokens=special))


async def decode(ids: list[int], service: Service) -> str:
    """The text of token ids, special tokens as their names.

    Raises:
        ApiError: 400, an id is not in the vocabulary, or there are too many.
    """
    engine = service.ready()
    if len(ids) > MAX_TOKENS:
        raise bad_request(f"tokens takes at most {MAX_TOKENS} ids, got {len(ids)}", "tokens")

    def work() -> str:
        for token in ids:
            _check_token(token, engine, "tokens")
        return engine.tokenizer.decode(ids, skip_special_tokens=False)

    return await maybe_in_thread(service, len(ids), work)


@dataclass(frozen=True, slots=True)
class Wish:
    """How long the answer may be. The names are the request's fields, for error messages."""

    tokens: int | None
    default: int | None
    """If no number is asked for; None: what the context leaves."""
    tokens_name: str
    prompt_name: str


def truncated(prompt: Prompt, fields: SamplingFields, wish: Wish, max_model_len: int) -> Prompt:
    """The prompt, or its last tokens where `truncate_prompt_tokens` asks for it (its first: `truncation_side` right).

    Raises:
        ApiError: 400, so many tokens are no prompt for this model.
    """
    most = fields.truncate_prompt_tokens
    if most is None:
        return prompt
    if most == -1:
        most = max_model_len - max(wish.tokens or wish.default or 1, 1)
    elif not 1 <= most < max_model_len:
        message = f"truncate_prompt_tokens must be -1 (all that fit) or in 1..{max_model_len - 1}, got {most}"
        raise bad_request(message, "truncate_prompt_tokens")
    if not 1 <= most < len(prompt.ids):
        return prompt
    return Prompt(prompt.ids[:most] if fields.truncation_side == "right" else prompt.ids[-most:], None)


def answer_room(prompt: Prompt, wish: Wish, max_model_len: int) -> int:
    """How many tokens the answer may have, at least 1 unless 0 are asked for.

    Raises:
        ApiError: 400, prompt and answer do not fit, with the numbers.
    """
    count = len(prompt.ids)
    room = max_model_len - count
    asked, name = wish.tokens, wish.tokens_name
    if asked is not None and asked < 0:
        raise bad_request(f"{name} must be at least 0, got {asked}", name)
    if room < 1:
        numbers = f"the prompt has {count} tokens, and at least one must be left for the answer"
        raise too_long(numbers, max_model_len, wish.prompt_name)
    if asked is None:
        return room if wish.default is None else min(wish.default, room)
    if asked > room:
        numbers = f"the prompt has {count} tokens and {name} is {asked}, together {count + asked}"
        raise too_long(numbers, max_model_len, name)
    return asked


def too_long(numbers: str, max_model_len: int, param: str) -> ApiError:
    message = f"{numbers}, but this model's maximum context length is {max_model_len} tokens"
    return bad_request(message, param, "context_length_exceeded")


async def maybe_in_thread[T](service: Service, size: int, work: Callable[[], T]) -> T:
    return work() if size <= INLINE_CHARACTERS else await service.in_thread(work)


def check_length(text: str, service: Service, param: str) -> None:
    """Refuses a text that is too long whatever its tokens are, before the work of tokenising it."""
    engine = service.ready()
    least = len(text) // engine.tokenizer.max_chars_per_token
    if least > engine.max_model_len:
        numbers = f"a text of {len(text)} characters has at least {least} tokens"
        raise too_long(numbers, engine.max_model_len, param)


def _prompt(entry: str | list[int], engine: Engine, special: bool) -> Prompt:
    if isinstance(entry, str):
        return Prompt(engine.tokenizer.encode(entry, add_special_tokens=special), entry)
    for token in entry:
        _check_token(token, engine, "prompt")
    return Prompt(entry, None)


def _check_token(token: int, engine: Engine, param: str) -> None:
    if not 0 <= token < engine.vocab_size:
        raise bad_request(f"{param} has token id {token}, but ids must be in 0..{engine.vocab_size - 1}", param)
