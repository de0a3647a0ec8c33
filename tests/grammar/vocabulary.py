"""Grammars over the vocabulary of the device that can be computed by hand."""

from __future__ import annotations

from collections.abc import Sequence

import llguidance
import numpy as np

from jaxserve.grammar.compile import Grammar
from jaxserve.grammar.constraint import Constraint
from tests.fake_executor import VOCAB, Letters, next_allowed

EOS = 3


class _Words:
    """What llguidance asks of a tokenizer that is no file."""

    def __init__(self) -> None:
        self.eos_token_id, self.bos_token_id = EOS, None
        self.tokens = [Letters().token_bytes(t) if t != EOS else b"<end>" for t in range(VOCAB)]
        self.special_token_ids = [EOS]

    def __call__(self, text: bytes) -> list[int]:
        return [byte - ord("0") for byte in text]


_VOCABULARY = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Words()), n_vocab=VOCAB)


def grammar(lark: str) -> Grammar:
    """Compiled; a text is written with the characters '0' to 'o', except '3', which ends it."""
    matcher = llguidance.LLMatcher(_VOCABULARY, llguidance.LLMatcher.grammar_from_lark(lark))
    assert not matcher.is_error(), matcher.get_error()
    return Grammar((EOS,), matcher, _VOCABULARY)


def masks(rows: int = 1) -> np.ndarray:
    return np.full((rows, VOCAB // 32), -1, np.int32)


def allowed(constraint: Constraint) -> list[int]:
    """The tokens that may follow."""
    mask = masks()
    constraint.fill(mask, 0)
    return [t for t in range(VOCAB) if int(mask.view(np.uint32)[0, t // 32]) >> t % 32 & 1]


def constrained(prompt: Sequence[int], count: int, constraint: Constraint) -> list[int]:
    """What a sequence alone would answer, token by token."""
    text = list(prompt)
    while len(text) < len(prompt) + count and text[-1:] != [EOS]:
        mask = masks()
        constraint.fill(mask, 0)
        text.append(next_allowed(text, mask[0].view(np.uint32)))
        assert constraint.accept(text[-1])
    return text[len(prompt) :]
