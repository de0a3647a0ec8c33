"""What the sampler is told about the S rows of a step. The caller gathers it; nothing here is kept between steps.

Rows that a step doesn't use may hold anything: they only ever change their own results.
"""

from __future__ import annotations

from dataclasses import dataclass

from jax.tree_util import register_dataclass
from jaxtyping import Array, Bool, Float32, Int32, UInt16, UInt32


@register_dataclass
@dataclass(frozen=True)
class RowParams:
    """What each row asks for."""

    temperature: Float32[Array, "S"]
    """0: the most likely token. Below 0.01 counts as 0.01."""
    top_k: Int32[Array, "S"]
    """0: off."""
    top_p: Float32[Array, "S"]
    """1: off."""
    min_p: Float32[Array, "S"]
    """0: off."""
    presence: Float32[Array, "S"]
    frequency: Float32[Array, "S"]
    repetition: Float32[Array, "S"]
    """1: off."""
    seed: UInt32[Array, "S 2"]
    min_tokens: Int32[Array, "S"]


@register_dataclass
@dataclass(frozen=True)
class RowText:
    """What has happened in each row."""

    position: Int32[Array, "S"]
    """Index in the sequence, prompt included, of the token to be drawn."""
    generated: Int32[Array, "S"]
    """Output tokens so far."""
    counts: UInt16[Array, "S V"]
    """How often each token was generated."""
    in_prompt: Bool[Array, "S V"]
    recent: Int32[Array, "S M-1"]
    """The last generated tokens, the newest last; -1 where there were none yet."""


@register_dataclass
@dataclass(frozen=True)
class RowLimits:
    """What each row may say. In a mask of W words, token v is bit v % 32 of word v // 32."""

    allow: UInt32[Array, "S W"]
    """Tokens that may be said at all."""
    stops: UInt32[Array, "S W"]
    """Tokens that end the sequence: not to be said before `min_tokens`."""
    bias_ids: Int32[Array, "S B"]
    """-1: no entry."""
    bias: Float32[Array, "S B"]
    bad: Int32[Array, "S N M"]
    """Sequences of 1 to M tokens that must not be completed, right-aligned behind -1; all -1: no entry."""


@register_dataclass
@dataclass(frozen=True)
class Wants:
    """Whether any row of the step needs a piece of work; what none needs is skipped at run time."""

    penalties: Bool[Array, ""]
    bias: Bool[Array, ""]
    bad_words: Bool[Array, ""]
    truncation: Bool[Array, ""]
    """top_k, top_p or min_p."""
    logprobs: Bool[Array, ""]


@register_dataclass
@dataclass(frozen=True)
class Sampled:
    """One token a row, and what the model thought of it and of the likeliest ones (zeros unless wanted).

    Log probabilities are natural, of the model's own logits: before masks, bias, penalties and temperature. Never NaN
    and never infinite: a token that the model rules out has about -3.4e38.
    """

    token: Int32[Array, "S"]
    logprob: Float32[Array, "S"]
    rank: Int32[Array, "S"]
    """1 + the number of tokens that are likelier."""
    top_ids: Int32[Array, "S top"]
    """Likeliest first; of equals the lower id."""
    top_logprobs: Float32[Array, "S top"]
