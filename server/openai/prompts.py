"""From what a request says to token ids: plain prompts, chat messages, and the room that is left for an answer.

Long texts are tokenised in a thread, so that other requests go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from server.errors import ApiError, bad_request
from server.openai.protocol import ChatFields, CompletionRequest, Message
from server.service import Engine, Service

MAX_PROMPTS = 1024
INLINE_CHARACTERS = 4000
"""Texts up to this length are tokenised at once: about a millisecond."""
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXT_PARTS = ("text", "input_text", "output_text")


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: list[int]
    text: str | None
    """As it was given; None if token ids were."""


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
        if isinstance(entry, str):
            _check_length(entry, service, "prompt")
    size = sum(len(entry) for entry in entries)
    prompts = await _maybe_in_thread(service, size, lambda: [_prompt(entry, engine, special) for entry in entries])
    if not all(prompt.ids for prompt in prompts):
        raise bad_request("prompt must not be empty", "prompt")
    return prompts


async def chat_prompt(fields: ChatFields, service: Service) -> Prompt:
    """The messages through the model's chat template, as token ids.

    Raises:
        ApiError: 400, messages that cannot be served, or that the template refuses.
    """
    _check_chat(fields)
    engine = service.ready()
    messages = [_message(message, i) for i, message in enumerate(fields.messages)]
    for message in messages:
        _check_length(str(message["content"]), service, "messages")
    resume = bool(fields.continue_final_message)

    def work() -> Prompt:
        text = engine.tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=not resume and fields.add_generation_prompt is not False,
            continue_final_message=resume,
            kwargs=fields.chat_template_kwargs,
        )
        return _prompt(text, engine, bool(fields.add_special_tokens))

    size = sum(len(str(m["content"])) for m in messages)
    try:
        prompt = await _maybe_in_thread(service, size, work)
    except ValueError as error:
        message = str(error)
        about = "chat_template_kwargs" if message.startswith("chat_template_kwargs") else "messages"
        raise bad_request(message, about) from None
    if not prompt.ids:
        raise bad_request("messages become an empty prompt", "messages")
    return prompt


async def encode(text: str, service: Service, *, special: bool) -> list[int]:
    """Token ids of a text of any length."""
    tokenizer = service.ready().tokenizer
    return await _maybe_in_thread(service, len(text), lambda: tokenizer.encode(text, add_special_tokens=special))


async def decode(ids: list[int], service: Service) -> str:
    """The text of token ids, special tokens as their names.

    Raises:
        ApiError: 400, an id is not in the vocabulary.
    """
    engine = service.ready()
    for token in ids:
        _check_token(token, engine, "tokens")
    return await _maybe_in_thread(service, len(ids), lambda: engine.tokenizer.decode(ids, skip_special_tokens=False))


@dataclass(frozen=True, slots=True)
class Wish:
    """How long the answer may be. The names are the request's fields, for error messages."""

    tokens: int | None
    default: int | None
    """If no number is asked for; None: what the context leaves."""
    tokens_name: str
    prompt_name: str


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
        raise _too_long(numbers, max_model_len, wish.prompt_name)
    if asked is None:
        return room if wish.default is None else min(wish.default, room)
    if asked > room:
        numbers = f"the prompt has {count} tokens and {name} is {asked}, together {count + asked}"
        raise _too_long(numbers, max_model_len, name)
    return asked


def _too_long(numbers: str, max_model_len: int, param: str) -> ApiError:
    message = f"{numbers}, but this model's maximum context length is {max_model_len} tokens"
    return bad_request(message, param, "context_length_exceeded")


async def _maybe_in_thread[T](service: Service, size: int, work: Callable[[], T]) -> T:
    return work() if size <= INLINE_CHARACTERS else await service.in_thread(work)


def _check_length(text: str, service: Service, param: str) -> None:
    """Refuses a text that is too long whatever its tokens are, before the work of tokenising it."""
    engine = service.ready()
    least = len(text) // engine.tokenizer.max_chars_per_token
    if least > engine.max_model_len:
        numbers = f"a text of {len(text)} characters has at least {least} tokens"
        raise _too_long(numbers, engine.max_model_len, param)


def _prompt(entry: str | list[int], engine: Engine, special: bool) -> Prompt:
    if isinstance(entry, str):
        return Prompt(engine.tokenizer.encode(entry, add_special_tokens=special), entry)
    for token in entry:
        _check_token(token, engine, "prompt")
    return Prompt(entry, None)


def _check_token(token: int, engine: Engine, param: str) -> None:
    if not 0 <= token < engine.vocab_size:
        raise bad_request(f"{param} has token id {token}, but ids must be in 0..{engine.vocab_size - 1}", param)


def _check_chat(fields: ChatFields) -> None:
    if not fields.messages:
        raise bad_request("messages must not be empty", "messages")
    if fields.add_generation_prompt and fields.continue_final_message:
        message = "add_generation_prompt and continue_final_message cannot both be true"
        raise bad_request(message, "continue_final_message")


def _message(message: Message, index: int) -> dict[str, object]:
    """The message as templates know it. OpenAI's `developer` is what templates call `system`."""
    where = f"messages[{index}]"
    if message.role not in _ROLES:
        raise bad_request(f"{where}.role must be one of {', '.join(_ROLES)}, got {message.role[:100]!r}", "messages")
    if message.role in ("tool", "function") or message.tool_calls or message.function_call:
        raise bad_request(f"{where}: tool calls are not served yet", "messages", "unsupported_parameter")
    found: dict[str, object] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _content(message, where),
    }
    if message.name is not None:
        found["name"] = message.name
    reasoning = message.reasoning if message.reasoning is not None else message.reasoning_content
    if reasoning is not None:
        found["reasoning_content"] = reasoning
    return found


def _content(message: Message, where: str) -> str:
    """Text parts, joined by newlines."""
    if message.content is None:
        if message.role == "assistant":
            return ""
        raise bad_request(f"{where}.content is missing", "messages")
    if isinstance(message.content, str):
        return message.content
    texts: list[str] = []
    for i, part in enumerate(message.content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in (*_TEXT_PARTS, "refusal"):
            at = f"{where}.content[{i}].type"
            raise bad_request(f"{at} is {part.type[:100]!r}, but this model takes only text", "messages")
        if text is None:
            raise bad_request(f"{where}.content[{i}].text is missing", "messages")
        texts.append(text)
    return "\n".join(texts)
