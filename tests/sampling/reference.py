"""The sampler's rules in numpy, one row at a time, by sorting, in float64. Slow and plain on purpose."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

NEVER = -np.inf


@dataclass(frozen=True)
class Ask:
    """What one row asks for and what has happened in it."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    seed: int = 0
    min_tokens: int = 0
    position: int = 0
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    allow: tuple[int, ...] | None = None
    stops: tuple[int, ...] = ()
    bias: dict[int, float] = field(default_factory=dict)
    bad: tuple[tuple[int, ...], ...] = ()


def edited(logits: np.ndarray, ask: Ask) -> np.ndarray:
    """Logits after masks, bias and penalties."""
    x = logits.astype(np.float64)
    if ask.allow is not None:
        x[[v for v in range(len(x)) if v not in ask.allow]] = NEVER
    for *before, last in ask.bad:
        if not before or ask.output[-len(before) :] == tuple(before):
            x[last] = NEVER
    if len(ask.output) < ask.min_tokens:
        x[list(ask.stops)] = NEVER
    for v, bias in ask.bias.items():
        x[v] += bias
    for v in set(ask.prompt) | set(ask.output):
        x[v] = x[v] / ask.repetition if x[v] > 0 else x[v] * ask.repetition
    for v in set(ask.output):
        x[v] -= ask.frequency * ask.output.count(v) + ask.presence
    return x


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - np.max(x))
    return weights / weights.sum()


def probabilities(logits: np.ndarray, ask: Ask) -> np.ndarray:
    """The distribution that a row draws from."""
    x = edited(logits, ask)
    if ask.temperature == 0:
        return np.eye(len(x))[np.argmax(x)]
    return truncated(softmax(x / max(ask.temperature, 0.01)), ask)


def truncated(p: np.ndarray, ask: Ask) -> np.ndarray:
    """min_p, then top_k, then top_p; each renormalised for the next; equals of the last one kept are kept."""
    p = np.where(p < ask.min_p * p.max(), 0, p)
    p = p / p.sum()
    if 0 < ask.top_k < len(p):
        p = np.where(p < np.sort(p)[-ask.top_k], 0, p)
        p = p / p.sum()
    if ask.top_p < 1:
        falling = np.sort(p)[::-1]
        last = min(int(np.searchsorted(np.cumsum(falling), ask.top_p)), len(p) - 1)
        p = np.where(p < falling[last], 0, p)
    return p / p.sum()


def logprobs(logits: np.ndarray) -> np.ndarray:
    return np.log(softmax(logits.astype(np.float64)))
