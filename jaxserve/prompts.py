"""What a caller may give as a prompt, and the tokens that it and its bad words become."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired, Protocol, TypedDict

from jaxserve.engine import Bounds
from jaxserve.host.answers import Vocabulary
from jaxserve.types import InvalidRequest, SamplingParams

MAX_WORD = 1000
"""Characters of a bad word: what is longer has too many tokens, and would take long to find that out."""


class TextPrompt(TypedDict):
    prompt: str


class TokensPrompt(TypedDict):
    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    """Their text, to be told again in the outputs."""


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt


class Tokenizes(Vocabulary, Protocol):
    """A tokenizer, as far as prompts need one."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


def tokens_of(prompt: Prompt, tokenizer: Tokenizes) -> tuple[str | None, tuple[int, ...]]:
    """The prompt's text, where it has one, and its token ids.

    Raises:
        InvalidRequest: it is none of the accepted forms.
    """
    unknown = sorted(set(prompt) - {"prompt", "prompt_token_ids"}) if isinstance(prompt, dict) else []
    if unknown:
        raise InvalidRequest(
            f"prompt has {unknown[0]!r}, which is not served; a dict takes prompt or prompt_token_ids", "prompt"
        )
    given: object = prompt.get("prompt") if isinstance(prompt, dict) else prompt
    if isinstance(prompt, dict) and "prompt_token_ids" in prompt:
        return (given if isinstance(given, str) else None), _ids(prompt["prompt_token_ids"])
    if isinstance(given, str):
        return given, tuple(tokenizer.encode(given))
    if isinstance(given, Sequence):
        return None, _ids(given)
    raise InvalidRequest(
        "prompt must be a string, a list of token ids, or a dict with 'prompt' or 'prompt_token_ids'", "prompt"
    )


def _ids(tokens: object) -> tuple[int, ...]:
    if isinstance(tokens, Sequence) and all(isinstance(t, int) and not isinstance(t, bool) for t in tokens):
        return tuple(tokens)
    raise InvalidRequest("prompt_token_ids must be integers", "prompt")


def bad_word_tokens(params: SamplingParams, tokenizer: Tokenizes, bounds: Bounds) -> tuple[tuple[int, ...], ...]:
    """`bad_words` as token sequences: each word as it begins a text and as it follows a space.

    Raises:
        InvalidRequest: a word has too many tokens, or there are too many words.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in params.bad_words or ():
        if len(word) > MAX_WORD:
            raise InvalidRequest(f"bad_words has an entry of {len(word)} characters, at most {MAX_WORD}", "bad_words")
        for text in (word, " " + word.lstrip()):
            tokens = tuple(tokenizer.encode(text, add_special_tokens=False))
            if tokens and max(tokens) < bounds.vocab:
                found[tokens] = None
            if len(tokens) > bounds.max_bad_tokens:
                raise InvalidRequest(
                    f"bad_words has an entry of {len(tokens)} tokens, at most {bounds.max_bad_tokens} are served: "
                    f"{word[:80]!r}",
                    "bad_words",
                )
    if len(found) > bounds.max_banned:
        raise InvalidRequest(f"bad_words become {len(found)} token sequences, at most {bounds.max_banned}", "bad_words")
    single = {tokens[0] for tokens in found if len(tokens) == 1}
    if params.allowed_token_ids is not None and single.issuperset(params.allowed_token_ids):
        raise InvalidRequest("bad_words forbid every one of allowed_token_ids; nothing is left to say", "bad_words")
    return tuple(found)
