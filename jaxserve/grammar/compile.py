"""Compiles what requests ask of their answers' shape, in threads of its own: no step and no event loop waits for it.

Owns the vocabulary in llguidance's form and the grammars compiled lately. Knows no request and no step.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import llguidance

from jaxserve.grammar.source import grammar_of
from jaxserve.types import EngineDead, InvalidRequest, StructuredOutputsParams

log = logging.getLogger(__name__)

_KEYWORDS = {
    "Resource '": "$ref or $schema",
    "Pointer '": "$ref",
    "regex parse error": "pattern",
    "patternProperty": "patternProperties",
    "Failed to generate regex for": "minimum, maximum, exclusiveMinimum or exclusiveMaximum",
    "invalid multiple": "multipleOf",
    "Unknown format": "format",
    "anyOf is empty": "enum",
}
"""Which keyword of a schema is meant by messages of llguidance that name none."""
_ONE_OF = "oneOf is served only where its alternatives are easily told apart; anyOf is the usual replacement"

KEPT = 128
"""Compiled grammars that are remembered."""
THREADS = 2
"""One that is busy with something large does not hold up the rest."""
WORDS = ("[a-z]{1,30}", "[A-Za-z ]{1,30}")
"""Tokens that are allowed or not as one, beside llguidance's own for JSON: plain text's masks take far less time."""
STACK_BYTES = 64 * 2**20
"""Of a compiling thread: the compiler recurses over chains of rules."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar, for any number of sequences."""

    eos: tuple[int, ...]
    """Tokens that may follow a complete text."""
    _first: llguidance.LLMatcher
    _vocabulary: llguidance.LLTokenizer

    def tokens_of(self, text: bytes) -> list[int]:
        return self._vocabulary.tokenize_bytes(text)

    def matcher(self) -> llguidance.LLMatcher:
        """At the beginning of a text."""
        return self._first.deep_copy()


class Compiler:
    """From `StructuredOutputsParams` to a `Grammar`."""

    def __init__(
        self,
        tokenizer: str,
        vocab: int,
        eos: Sequence[int],
        *,
        disable_any_whitespace: bool = False,
        disable_additional_properties: bool = True,
    ) -> None:
        """Takes about a second for 50,000 tokens.

        Args:
            tokenizer: its definition, in the tokenizers library's JSON.
            vocab: token ids of the model.
            eos: tokens that end a text.
            disable_any_whitespace: as if every request said so.
            disable_additional_properties: for requests that do not say.
        """
        self._compact, self._closes = disable_any_whitespace, disable_additional_properties
        self._eos = tuple(eos)
        self._vocabulary = _vocabulary(tokenizer, vocab, self._eos)
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._lock = threading.Lock()
        before = threading.stack_size(STACK_BYTES)
        try:
            self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar")
            all_here = threading.Barrier(THREADS)
            for started in [self._threads.submit(all_here.wait) for _ in range(THREADS)]:
                started.result()
        finally:
            threading.stack_size(before)

    def submit(self, asked: StructuredOutputsParams) -> Future[Grammar]:
        """Compiles in another thread.

        The future raises `InvalidRequest` where the grammar is wrong, too large, or uses what is not served.

        Raises:
            EngineDead: it is closed.
        """
        try:
            return self._threads.submit(self._compile, asked)
        except RuntimeError:
            raise EngineDead("the engine is closed") from None

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _settled(self, asked: StructuredOutputsParams) -> StructuredOutputsParams:
        closes = asked.disable_additional_properties
        return replace(
            asked,
            disable_any_whitespace=asked.disable_any_whitespace or self._compact,
            disable_additional_properties=self._closes if closes is None else closes,
        )

    def _compile(self, asked: StructuredOutputsParams) -> Grammar:
        if self._vocabulary is None:
            raise InvalidRequest("structured outputs cannot be had with this model's tokenizer", "structured_outputs")
        text = grammar_of(self._settled(asked))
        with self._lock:
            if text in self._kept:
                self._kept.move_to_end(text)
                return self._kept[text]
        matcher = llguidance.LLMatcher(self._vocabulary, text, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise InvalidRequest(f"structured_outputs.{asked.kind}: {_why(matcher)}", "structured_outputs")
        grammar = Grammar(self._eos, matcher, self._vocabulary)
        with self._lock:
            self._kept[text] = grammar
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return grammar


def _why(matcher: llguidance.LLMatcher) -> str:
    """The error, on one line, with the keyword of the schema that it is about."""
    message = " ".join(matcher.get_error().split())
    if "coerce_one_of" in message:
        return _ONE_OF
    keyword = next((word for start, word in _KEYWORDS.items() if start in message), None)
    return (message if keyword is None else f"{keyword}: {message}")[:1000]


def _vocabulary(tokenizer: str, vocab: int, eos: Sequence[int]) -> llguidance.LLTokenizer | None:
    if not eos:
        log.warning("no structured outputs: no token ends this model's texts")
        return None
    slices = [*WORDS, *llguidance.LLTokenizer.general_slices()]
    try:
        return llguidance.LLTokenizer(tokenizer, n_vocab=vocab, eos_token=list(eos), slices=slices)
    except ValueError as error:
        log.warning("no structured outputs: llguidance cannot read this model's tokenizer (%s)", error)
        return None
