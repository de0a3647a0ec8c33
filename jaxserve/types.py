"""The records that cross room borders: what a caller asks, what the engine answers.

Everything here is frozen and plain Python. Names and defaults follow vLLM and OpenAI, because clients
already use them. This file must never import jax. What is made for every token is a `Struct`, far cheaper to make
than a frozen dataclass; `msgspec.structs.replace` changes a copy of one.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import UnionType
from typing import Literal, NamedTuple, Protocol

from msgspec import Struct

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_N = 128
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 128
MAX_LENGTH_PENALTY = 10
SEED_RANGE = (-(2**63), 2**63 - 1)


class OutputKind(enum.Enum):
    """How much of an answer each `RequestOutput` carries."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


Constrained = Literal["json", "regex", "choice", "grammar", "json_object", "structural_tag"]
CONSTRAINTS: tuple[Constrained, ...] = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """What an answer must look like: exactly one of the first six. Names are vLLM's.

    Attributes:
        json: a JSON Schema, as text or as an object.
        regex: the whole answer matches it.
        choice: the answer is one of these.
        grammar: a Lark grammar with the rule `start`, or GBNF/EBNF with the rule `root`.
        json_object: any JSON object.
        structural_tag: text that is free but for tagged parts, as JSON (vLLM's `structures` and `triggers`).
        disable_any_whitespace: JSON without any; else a few blanks may stand between its parts.
        disable_additional_properties: objects that list their properties and say nothing of others have no others;
            unset: as the engine is told, which is yes unless it is told otherwise.
        whitespace_pattern: a regex of what may stand between the parts of JSON.

    Raises:
        ValueError: not exactly one is given, or one of another type; the message begins with the field's name.
    """

    json: str | bool | Mapping[str, object] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = self._given()
        if len(given) != 1:
            got = ", ".join(given) or "none"
            raise ValueError(f"structured_outputs takes exactly one of {', '.join(CONSTRAINTS)}, got {got}")
        for name in ("regex", "grammar", "structural_tag", "whitespace_pattern"):
            self._check_type(name, str | None, "must be a string")
        self._check_type("disable_any_whitespace", bool, "must be true or false")
        for name in ("json_object", "disable_additional_properties"):
            self._check_type(name, bool | None, "must be true or false")
        self._check_type("json", str | bool | Mapping | None, "must be a JSON Schema")
        if self.choice is not None:
            _check_list("structured_outputs.choice", self.choice)
            _check(bool(self.choice), "structured_outputs.choice", "must not be empty", self.choice)
            for text in self.choice:
                _check(type(text) is str, "structured_outputs.choice", "must hold strings", text)
            object.__setattr__(self, "choice", tuple(self.choice))

    @property
    def kind(self) -> Constrained:
        """Which of the six is given."""
        return self._given()[0]

    def _given(self) -> list[Constrained]:
        values: dict[Constrained, object] = {name: getattr(self, name) for name in CONSTRAINTS}
        return [name for name, v in values.items() if v is not None and (v is not False or name == "json")]

    def _check_type(self, name: str, kind: type | UnionType, rule: str) -> None:
        value = getattr(self, name)
        _check(isinstance(value, kind), f"structured_outputs.{name}", rule, value)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. Field names, defaults and ranges are vLLM's.

    `temperature` 0 is greedy. `top_k` 0 or -1 is off. `max_tokens` None means up to the context length.
    `logprobs` and `prompt_logprobs` take a count or -1 for the whole vocabulary, within the engine's
    `max_logprobs`. `spaces_between_special_tokens` is the same either way: the tokenizers that are served put none
    there. `seed` makes the draws of this request reproducible, whatever else is running.
    `thinking_token_budget`: tokens that the model may think for; then its thinking is ended for it.

    Raises:
        ValueError: a field is out of range; the message begins with the field's name.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: OutputKind = OutputKind.CUMULATIVE
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    skip_reading_prefix_cache: bool | None = None
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: int | None = None

    def __post_init__(self) -> None:
        put = functools.partial(object.__setattr__, self)
        for name in ("stop_token_ids", "bad_words", "allowed_token_ids"):
            _check_list(name, getattr(self, name))
        if not isinstance(self.stop, str):
            _check_list("stop", self.stop)
        put("stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()))
        put("stop_token_ids", tuple(self.stop_token_ids or ()))
        put("bad_words", tuple(self.bad_words or ()))
        if self.logit_bias is not None:
            put("logit_bias", {_int("logit_bias", k): _number("logit_bias", v) for k, v in self.logit_bias.items()})
        if self.allowed_token_ids is not None:
            put("allowed_token_ids", tuple(self.allowed_token_ids))
        if self.seed == -1:
            put("seed", None)
        if self.top_k == -1:
            put("top_k", 0)
        self._check_numbers()
        self._check_lists()

    def _check_numbers(self) -> None:
        whole = ("n", "top_k", "min_tokens")
        optional = ("seed", "max_tokens", "logprobs", "prompt_logprobs", "thinking_token_budget")
        real = ("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p")
        for name in whole:
            _int(name, getattr(self, name))
        for name in optional:
            if getattr(self, name) is not None:
                _int(name, getattr(self, name))
        for name in real:
            _number(name, getattr(self, name))
        _check(1 <= self.n <= MAX_N, "n", f"must be in 1..{MAX_N}", self.n)
        for name in ("presence_penalty", "frequency_penalty"):
            _check(-2 <= getattr(self, name) <= 2, name, "must be in [-2, 2]", getattr(self, name))
        _check(self.repetition_penalty > 0, "repetition_penalty", "must be greater than 0", self.repetition_penalty)
        _check(0 <= self.temperature <= 2, "temperature", "must be in [0, 2]", self.temperature)
        _check(0 < self.top_p <= 1, "top_p", "must be in (0, 1]", self.top_p)
        _check(self.top_k >= 0, "top_k", "must be -1 or 0 (off), or at least 1", self.top_k)
        _check(0 <= self.min_p <= 1, "min_p", "must be in [0, 1]", self.min_p)
        if self.seed is not None:
            _check(SEED_RANGE[0] <= self.seed <= SEED_RANGE[1], "seed", "must fit in 64 bits, signed", self.seed)
        if self.max_tokens is not None:
            _check(self.max_tokens >= 1, "max_tokens", "must be at least 1", self.max_tokens)
        _check(self.min_tokens >= 0, "min_tokens", "must be at least 0", self.min_tokens)
        if self.max_tokens is not None:
            _check(self.min_tokens <= self.max_tokens, "min_tokens", "must not exceed max_tokens", self.min_tokens)
        if self.thinking_token_budget is not None:
            least = self.thinking_token_budget >= 0
            _check(least, "thinking_token_budget", "must be at least 0", self.thinking_token_budget)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _check(value is None or value >= -1, name, "must be -1 (all) or at least 0", value)

    def _check_lists(self) -> None:
        wanted = self.structured_outputs
        known = wanted is None or type(wanted) is StructuredOutputsParams
        _check(known, "structured_outputs", "must be StructuredOutputsParams", wanted)
        for name in ("stop", "bad_words"):
            for text in getattr(self, name):
                _check(isinstance(text, str) and text != "", name, "must hold strings that are not empty", text)
        _check(not self.stop or self.detokenize, "stop", "needs detokenize=True", self.stop)
        for name in ("stop_token_ids", "allowed_token_ids"):
            for token in getattr(self, name) or ():
                _check(_int(name, token) >= 0, name, "must hold token ids of 0 or more", token)
        empty = self.allowed_token_ids is not None and not self.allowed_token_ids
        _check(not empty, "allowed_token_ids", "must not be empty", self.allowed_token_ids)
        _check(len(self.bad_words or ()) <= MAX_BAD_WORDS, "bad_words", f"takes at most {MAX_BAD_WORDS}", "more")
        bias = self.logit_bias or {}
        _check(len(bias) <= MAX_LOGIT_BIAS, "logit_bias", f"takes at most {MAX_LOGIT_BIAS} entries", len(bias))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def clone(self, **changes: object) -> SamplingParams:
        """A copy with some fields changed, checked again."""
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """How to search for the likeliest answers. Names and defaults are vLLM's.

    A beam is ranked by its log probability / length**length_penalty, where the length is that of the answer. The log
    probabilities are the model's own, as at `temperature` 1; 0, vLLM's default, means the same.

    Raises:
        ValueError: a field is out of range; the message begins with the field's name.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            _check(_int(name, getattr(self, name)) >= 1, name, "must be at least 1", getattr(self, name))
        _check(self.beam_width <= MAX_N, "beam_width", f"must be at most {MAX_N}", self.beam_width)
        for name in ("ignore_eos", "include_stop_str_in_output"):
            _check(isinstance(getattr(self, name), bool), name, "must be true or false", getattr(self, name))
        plain = _number("temperature", self.temperature) in (0, 1)
        _check(plain, "temperature", "must be 0 or 1 in a beam search, which does not sample", self.temperature)
        fits = -MAX_LENGTH_PENALTY <= _number("length_penalty", self.length_penalty) <= MAX_LENGTH_PENALTY
        rule = f"must be in [-{MAX_LENGTH_PENALTY}, {MAX_LENGTH_PENALTY}]"
        _check(fits, "length_penalty", rule, self.length_penalty)


def _check(ok: bool, name: str, rule: str, value: object) -> None:
    if not ok:
        raise ValueError(f"{name} {rule}, got {str(value)[:200]!r}")


def _check_list(name: str, value: object) -> None:
    if value is not None and not isinstance(value, list | tuple | set | frozenset):
        raise ValueError(f"{name} must be a list, got {str(value)[:200]!r}")


def _int(name: str, value: object) -> int:
    if isinstance(value, str) and name == "logit_bias":
        try:
            value = int(value)
        except ValueError:
            raise ValueError(f"logit_bias keys must be token ids, got {value[:100]!r}") from None
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, got {str(value)[:200]!r}")
    return value


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {str(value)[:200]!r}")
    return value


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to answer. `priority`: lower is sooner; `cache_salt` keeps its prefix pages to itself."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    prompt: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    arrival: float = 0.0
    """Seconds on the monotonic clock."""
    thinking_end: str | None = None
    """The answer begins by thinking, and this text ends it. Constraints begin after it."""


class Logprob(NamedTuple):
    """Natural-log probability of a token, its rank (1 = most likely) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]
"""The chosen token first, then the most likely ones, by token id."""


class CompletionOutput(Struct, frozen=True):
    """One choice of an answer. `stop_reason` is the stop string or token id that ended it, if one did."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


class RequestTimes(Struct, frozen=True):
    """Seconds on the monotonic clock; 0.0 means: has not happened."""

    arrival: float = 0.0
    first_scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0


class RequestOutput(Struct, frozen=True):
    """What a request has produced: all of it, or what is new (see `OutputKind`)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One entry a prompt token; the first is None. Comes with the first output."""
    num_cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache."""
    metrics: RequestTimes = RequestTimes()


@dataclass(frozen=True, slots=True)
class StepStats:
    """One committed step, for logs and metrics. Token counts are of this step; the rest is the state after it."""

    running: int
    waiting: int
    pages_used: int
    """Pages that a sequence holds (cached pages nobody holds are free)."""
    pages_total: int
    slots_unused: float
    """Share of the KV slots in held pages that hold no token yet, 0..1."""
    prompt_tokens: int
    """Prompt tokens whose KV this step computed."""
    generation_tokens: int
    prefix_queries: int
    """Prompt tokens looked up in the prefix cache by requests admitted in this step."""
    prefix_hits: int
    preemptions: int
    first_token_seconds: tuple[float, ...]
    inter_token_seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RequestStats:
    """A request that has ended."""

    times: RequestTimes
    finished: float
    """Seconds on the monotonic clock."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    finish_reason: FinishReason
    n: int
    max_tokens: int | None
    shaped: bool
    """It asked for structured outputs: with the finish reason `length` they are a beginning."""


class Observer(Protocol):
    """Whoever wants to know what the engine does (metrics, the log line). Called from the engine's thread; be quick."""

    def on_step(self, step: StepStats) -> None: ...

    def on_finish(self, request: RequestStats) -> None: ...

    def on_recompile(self, seconds: float) -> None:
        """XLA compiled something after warm-up."""
        ...


class InvalidRequest(ValueError):
    """The caller's mistake; `param` names the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class EngineDead(RuntimeError):
    """The engine's thread has failed; nothing can be served until the process is restarted."""
