"""Log probabilities in OpenAI's two shapes: lists beside each other (completions), one record a token (chat).

A token that is not whole characters is written as OpenAI does, `bytes:\\xf0\\x9f`; its bytes are exact in chat.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from jaxserve.types import Logprob, TokenLogprobs
from server.openai.protocol import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from server.service import Tokenizer

LEAST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def token_name(token: int, tokenizer: Tokenizer, as_id: bool) -> str:
    """The token's text; `token_id:N` where the caller asked for ids."""
    if as_id:
        return f"token_id:{token}"
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class Lines:
    """The lists of one completion choice, as its tokens come; knows how many characters came before."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool, skip_special: bool, offset: int = 0) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._skip_special = skip_special
        self._offset = offset
        self._text = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> CompletionLogprobs:
        lists = CompletionLogprobs([], [], [], [])
        for token, found in zip(ids, logprobs, strict=True):
            lists.text_offset.append(self._offset)
            lists.tokens.append(self._name(token))
            lists.token_logprobs.append(None if found is None else _finite(found[token].logprob))
            lists.top_logprobs.append(
                None if found is None else {self._name(t): _finite(p.logprob) for t, p in found.items()}
            )
            self._offset += self._length(token)
        return lists

    def _name(self, token: int) -> str:
        return token_name(token, self._tokenizer, self._as_ids)

    def _length(self, token: int) -> int:
        if self._skip_special and token in self._tokenizer.special_ids:
            return 0
        return len(self._text.decode(self._tokenizer.token_bytes(token)))


def joined(first: CompletionLogprobs, later: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        first.text_offset + later.text_offset,
        first.token_logprobs + later.token_logprobs,
        first.tokens + later.tokens,
        first.top_logprobs + later.top_logprobs,
    )


def chat_logprobs(
    ids: Sequence[int], logprobs: Sequence[TokenLogprobs], top: int, tokenizer: Tokenizer, as_ids: bool
) -> ChatLogprobs:
    """One record a token, each with its `top` most likely alternatives (-1: all), best first."""
    return ChatLogprobs([_chat_token(i, p, top, tokenizer, as_ids) for i, p in zip(ids, logprobs, strict=True)])


def trimmed(given: Sequence[TokenLogprobs | None], most: int) -> list[TokenLogprobs | None]:
    """The token itself, which comes first, and the `most` likeliest ones (-1: all)."""
    return [
        found and {t: p for i, (t, p) in enumerate(found.items()) if i == 0 or most < 0 or (p.rank or 0) <= most}
        for found in given
    ]


def prompt_logprobs(given: Sequence[TokenLogprobs | None]) -> PromptLogprobs:
    """vLLM's shape: by token id, null for the first token."""
    return [
        None
        if found is None
        else {str(t): PromptLogprob(_finite(p.logprob), p.rank, p.decoded_token) for t, p in found.items()}
        for found in given
    ]


def _chat_token(token: int, found: TokenLogprobs, top: int, tokenizer: Tokenizer, as_ids: bool) -> ChatLogprob:
    best = [
        TopLogprob(token_name(t, tokenizer, as_ids), _finite(p.logprob), list(tokenizer.token_bytes(t)))
        for t, p in _most_likely(token, found, top)
    ]
    own = _finite(found[token].logprob)
    return ChatLogprob(token_name(token, tokenizer, as_ids), own, list(tokenizer.token_bytes(token)), best)


def _most_likely(token: int, found: TokenLogprobs, top: int) -> list[tuple[int, Logprob]]:
    """Best first. The chosen token is in `found` in any case, so it may be one too many: not among the best."""
    rest = [(t, p) for t, p in found.items() if t != token]
    if top < 0 or len(rest) < top:
        rest.append((token, found[token]))
    return sorted(rest, key=lambda item: -item[1].logprob)


def _finite(value: float) -> float:
    return max(value, LEAST)
