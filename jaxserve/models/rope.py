"""From the rope fields of a config.json to a `Rope`: one function a kind of scaling, in float64.

Reads both spellings: `rope_parameters`, and the older `rope_scaling` beside `rope_theta`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from jaxserve.layers.rope import Rope, Stretch

Frequencies = np.ndarray
"""f64[R/2]: radians a position, for each pair of the R rotated dimensions."""


@dataclass(frozen=True)
class _Fields:
    """The rope fields of a config, whichever way they are spelt, and what they default to."""

    values: Mapping[str, object]
    where: str
    head_dim: int
    max_position: int

    @property
    def theta(self) -> float:
        return self.positive("rope_theta", 10_000.0)

    @property
    def original(self) -> float:
        return self.positive("original_max_position_embeddings", self.max_position)

    @property
    def pairs(self) -> int:
        share = self.positive("partial_rotary_factor", 1.0)
        rotated = int(self.head_dim * share)
        if share > 1 or rotated % 2 or rotated == 0:
            raise ValueError(
                f"{self.where}.partial_rotary_factor {share} leaves {rotated} of head_dim {self.head_dim} to rotate; "
                f"it must be an even number between 2 and {self.head_dim}"
            )
        return rotated // 2

    @property
    def plain(self) -> Frequencies:
        return self.theta ** (-np.arange(self.pairs, dtype=np.float64) / self.pairs)

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{self.where}.{name} must be a number, got {value!r}")
        return float(value)

    def positive(self, name: str, default: float | None = None) -> float:
        value = self.number(name, default)
        if value <= 0:
            raise ValueError(f"{self.where}.{name} must be greater than 0, got {value}")
        return value


def from_hf(config: Mapping[str, object], head_dim: int, max_position: int) -> Rope:
    """The rope of a model. `max_position`: the config's `max_position_embeddings`.

    Raises:
        ValueError: the rope type is not known, or a field is missing or out of range; the message names the field.
    """
    fields = _fields(config, head_dim, max_position)
    kind = rope_type(config)
    if kind not in _KINDS:
        known = ", ".join(sorted(_KINDS))
        raise ValueError(f"{fields.where}.rope_type {kind!r} is not supported; supported: {known}")
    return _KINDS[kind](fields)


def longest(config: Mapping[str, object], max_position: int) -> int:
    """Positions a model may be served at: `max_position_embeddings`, stretched where the scaling is meant to.

    As vLLM: `linear` and `dynamic` multiply it by their factor, `yarn` multiplies the original length.
    """
    kind = rope_type(config)
    fields = _fields(config, 0, max_position)
    if kind in ("linear", "dynamic"):
        return int(max_position * fields.positive("factor"))
    return int(fields.original * _yarn_factor(fields)) if kind == "yarn" else max_position


def rope_type(config: Mapping[str, object]) -> str:
    """The kind of scaling a config asks for, "default" if none."""
    values, _ = _spelling(config)
    return str(values.get("rope_type") or values.get("type") or "default")


def _spelling(config: Mapping[str, object]) -> tuple[Mapping[str, object], str]:
    for name in ("rope_scaling", "rope_parameters"):
        values = config.get(name)
        if values:
            if not isinstance(values, Mapping) or any(isinstance(v, Mapping) for v in values.values()):
                raise ValueError(f"{name} must be one set of rope fields, shared by all layers, got {values!r}")
            return values, name
    return {}, "rope_parameters"


def _fields(config: Mapping[str, object], head_dim: int, max_position: int) -> _Fields:
    values, where = _spelling(config)
    # The fields that a config may keep outside; only the original length outside wins over one inside.
    outside = {k: config[k] for k in ("rope_theta", "partial_rotary_factor") if config.get(k) is not None}
    merged = {**outside, **{k: v for k, v in values.items() if v is not None}}
    if config.get("original_max_position_embeddings") is not None:
        merged["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    return _Fields(merged, where, head_dim, max_position)


def _rope(inv_freq: Frequencies, scale: float = 1.0, stretch: Stretch | None = None) -> Rope:
    return Rope(tuple(inv_freq.tolist()), scale, stretch)


def _default(f: _Fields) -> Rope:
    return _rope(f.plain)


def _linear(f: _Fields) -> Rope:
    return _rope(f.plain / f.positive("factor"))


def _dynamic(f: _Fields) -> Rope:
    if f.pairs < 2:
        raise ValueError(f"{f.where}.rope_type 'dynamic' needs at least 4 rotated dimensions")
    return _rope(f.plain, stretch=Stretch(f.positive("factor"), f.max_position))


def _factors(f: _Fields) -> Rope:
    """One divisor a frequency, as a GGUF file's rope_freqs.weight holds."""
    divisors = np.asarray(f.values.get("factors"), np.float64)
    if divisors.shape != (f.pairs,) or not (divisors > 0).all():
        raise ValueError(f"{f.where}.factors must hold {f.pairs} numbers greater than 0, got shape {divisors.shape}")
    return _rope(f.plain / divisors)


def _llama3(f: _Fields) -> Rope:
    """Short waves stay, long ones are slowed by `factor`, those between are blended."""
    low, high = f.positive("low_freq_factor"), f.positive("high_freq_factor")
    if low >= high:
        raise ValueError(f"{f.where}.low_freq_factor {low} must be less than high_freq_factor {high}")
    turns = f.original * f.plain / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return _rope(f.plain * (keep + (1 - keep) / f.positive("factor")))


def _yarn(f: _Fields) -> Rope:
    """Dimensions that turn often within the original length stay, those that turn seldom are slowed, by a ramp."""
    factor = _yarn_factor(f)
    dims = 2 * f.pairs
    # The dimension that turns `turns` times within the original length.
    turning = lambda turns: dims * math.log(f.original / (turns * 2 * math.pi)) / (2 * math.log(f.theta))  # noqa: E731
    # 0 counts as unset here, as in transformers.
    first, last = turning(f.number("beta_fast", 0) or 32.0), turning(f.number("beta_slow", 0) or 1.0)
    if f.values.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dims - 1)
    slowed = np.clip((np.arange(f.pairs) - first) / ((last - first) or 0.001), 0.0, 1.0)
    return _rope(f.plain * (1 - slowed + slowed / factor), _yarn_scale(f, factor))


def _yarn_factor(f: _Fields) -> float:
    return f.positive("factor", f.max_position / f.original)


def _yarn_scale(f: _Fields, factor: float) -> float:
    """The attention factor that a config states, or the one its mscale fields or its factor imply."""
    if f.values.get("attention_factor") is not None:
        return f.positive("attention_factor")
    magnitude = lambda m: 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0  # noqa: E731
    over, under = f.number("mscale", 0), f.number("mscale_all_dim", 0)
    return magnitude(over) / magnitude(under) if over and under else magnitude(1.0)


_KINDS: dict[str, Callable[[_Fields], Rope]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "factors": _factors,
}
