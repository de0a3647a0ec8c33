"""A toy engine with the interface of `AsyncEngine`, whose greedy answers can be written down by hand.

A token is a byte; 256 begins a text, 257 ends one, 258 is <|user|>. After a letter comes the next one (z: a), after
"!" comes "é" (two tokens), after "." the end, after anything else "a".
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field

from jaxserve.host.text import Piece, TextStream
from jaxserve.types import (
    CompletionOutput,
    EngineDead,
    FinishReason,
    InvalidRequest,
    Logprob,
    OutputKind,
    RequestOutput,
    RequestTimes,
    SamplingParams,
    TokenLogprobs,
)

BOS, EOS, USER = 256, 257, 258
NAMES = {BOS: "<s>", EOS: "</s>", USER: "<|user|>"}
VOCAB = 259
ARRIVAL = 100.0
"""When every request comes; a quarter of a second later it runs, another one later it has its first token."""
LETTERS = range(ord("a"), ord("z") + 1)


class FakeTokenizer:
    """Bytes as tokens. `template`: only what can be told of it by reading; it always renders in the same way."""

    special_ids = frozenset(NAMES)
    max_chars_per_token = 8
    template_variables: Mapping[str, object] = {"bos_token": NAMES[BOS]}

    def __init__(self, template: str | None = "{{ messages }}") -> None:
        self.template = template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = [BOS] if add_special_tokens else []
        for part in text.replace(NAMES[USER], "\0").split("\0"):
            ids += [*part.encode(), USER]
        return ids[:-1]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        shown = [i for i in ids if not (skip_special_tokens and i in NAMES)]
        return b"".join(map(self.token_bytes, shown)).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        return NAMES[token].encode() if token in NAMES else bytes([token])

    def template_for(self, *, tools: bool) -> str | None:
        return self.template

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        kwargs: Mapping[str, object] | None = None,
    ) -> str:
        if messages[0]["role"] == "assistant":
            raise ValueError("chat template: the user must begin")
        text = "".join(
            f"<|user|>{told}:{json.dumps(list(given))}\n"
            for told, given in (("tools", tools), ("documents", documents))
            if given
        )
        self.rendered = list(messages)
        text += "".join(f"<|user|>{m['role']}:{m['content']}\n" for m in messages)
        if continue_final_message:
            return text[:-1]
        return text + str((kwargs or {}).get("opening", "<|user|>assistant:" if add_generation_prompt else ""))


class ByteStream:
    """Bytes to characters, one at a time."""

    def __init__(self, skip_special: bool) -> None:
        self._skip, self._pending = skip_special, b""

    def step(self, token: int) -> str | None:
        if token in NAMES:
            return "" if self._skip else NAMES[token]
        self._pending += bytes([token])
        try:
            text, self._pending = self._pending.decode(), b""
        except UnicodeDecodeError:
            return None
        return text

    def flush(self) -> str:
        text, self._pending = self._pending.decode("utf-8", "replace"), b""
        return text


def greedy_next(token: int) -> int:
    if token in LETTERS:
        return LETTERS[(token - ord("a") + 1) % 26]
    return {ord("!"): 0xC3, 0xC3: 0xA9, ord("."): EOS}.get(token, ord("a"))


def logits(token: int) -> list[float]:
    """Highest for the greedy one, then falling from letter to letter."""
    best = greedy_next(token)
    found = [-20.0] * VOCAB
    for step in range(26):
        found[LETTERS[(max(best - ord("a"), 0) + step) % 26]] = 2.0 - 0.4 * step
    found[best] = 2.5
    return found


@dataclass
class Choice:
    """One answer on its way."""

    index: int
    ids: list[int]
    stream: TextStream
    draw: random.Random
    generated: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def likelihood(self) -> float | None:
        found = zip(self.generated, self.logprobs, strict=False)
        return sum(scores[token].logprob for token, scores in found) if self.logprobs else None


class FakeEngine:
    """Same names as `AsyncEngine`. `delay`: seconds a token takes."""

    def __init__(self, *, max_model_len: int = 1024, delay: float = 0.0, default: Mapping[str, object] | None = None):
        self.tokenizer = FakeTokenizer()
        self.max_model_len = max_model_len
        self.vocab_size = VOCAB
        self.max_logprobs = 20
        self.eos_token_ids = (EOS,)
        self.default_params: Mapping[str, object] = default or {}
        self.dead: BaseException | None = None
        self.delay = delay
        self.running: set[str] = set()
        self.seen: list[str] = []
        self.prompts: list[list[int]] = []
        self.aborted: list[str] = []
        self.params: list[SamplingParams] = []
        self.salts: list[str | None] = []
        self.thinking_ends: list[str | None] = []
        self.closed = False
        self.script: str | None = None
        """What every answer is, whatever is asked."""
        self.rows = 256
        self.sizes: dict[str, tuple[int, int]] = {}
        """Of running requests, in order: their sequences, and the prompt tokens of all these."""
        self.tokens_made = 0

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        thinking_end: str | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        self._check(prompt, params, request_id, priority)
        self.running.add(request_id)
        self.sizes[request_id] = (params.n, params.n * len(prompt))
        self.seen.append(request_id)
        self.prompts.append(list(prompt))
        self.params.append(params)
        self.salts.append(cache_salt)
        self.thinking_ends.append(thinking_end)
        done = False
        try:
            async for output in self._outputs(list(prompt), params, request_id):
                done = output.finished
                yield output
        finally:
            self.running.discard(request_id)
            del self.sizes[request_id]
            if not done:
                self.aborted.append(request_id)

    def waiting_with(self, sequences: int, tokens: int) -> tuple[int, int]:
        """As if there were `rows` rows, held by the sequences that came first."""
        free, waiting, prompts = self.rows, 0, 0
        for count, length in (*self.sizes.values(), (sequences, tokens)):
            left = max(0, count - free)
            free, waiting, prompts = max(0, free - count), waiting + left, prompts + length * left // count
        return waiting, prompts

    def close(self) -> None:
        self.closed = True

    def _check(self, prompt: Sequence[int], params: SamplingParams, request_id: str, priority: int) -> None:
        if self.dead is not None:
            raise EngineDead("dead")
        assert request_id not in self.running
        if priority:
            raise InvalidRequest("priority needs --scheduling-policy priority", "priority")
        for token in params.logit_bias or ():
            if not 0 <= token < VOCAB:
                raise InvalidRequest(f"logit_bias has token id {token}", "logit_bias")

    async def _outputs(self, prompt: list[int], p: SamplingParams, request_id: str) -> AsyncGenerator[RequestOutput]:
        choices = [self._choice(prompt, p, i) for i in range(p.n)]
        limit = min(p.max_tokens or self.max_model_len, self.max_model_len - len(prompt))
        scores = None if p.prompt_logprobs is None else tuple(self._prompt_scores(prompt, p.prompt_logprobs))
        delta = p.output_kind is OutputKind.DELTA
        while live := [c for c in choices if c.reason is None]:
            await asyncio.sleep(self.delay)
            if self.dead is not None:
                raise EngineDead("dead")
            news = [self._advance(c, p, limit) for c in live]
            finished = all(c.reason for c in choices)
            if delta or finished:
                outputs = news if delta else [self._all(c, p) for c in choices]
                made = max(len(c.generated) for c in choices)
                times = RequestTimes(ARRIVAL, ARRIVAL + 0.25, ARRIVAL + 0.5, ARRIVAL + 0.5 + 0.125 * (made - 1))
                yield RequestOutput(
                    request_id, None, tuple(prompt), tuple(outputs), finished, scores, len(prompt) // 16 * 16, times
                )
                scores = None

    def _choice(self, prompt: list[int], p: SamplingParams, index: int) -> Choice:
        stops = p.stop if isinstance(p.stop, tuple) else ()
        stream = TextStream(
            ByteStream(p.skip_special_tokens), stops, include_stop=p.include_stop_str_in_output, min_tokens=p.min_tokens
        )
        seed = None if p.seed is None else p.seed * 1000 + index
        return Choice(index, list(prompt), stream, random.Random(seed))

    def _advance(self, c: Choice, p: SamplingParams, limit: int) -> CompletionOutput:
        """One token more; what it adds."""
        self.tokens_made += 1
        raw = logits(c.ids[-1])
        token = self._sample(c, p, list(raw))
        c.ids.append(token)
        c.generated.append(token)
        if p.logprobs is not None:
            c.logprobs.append(_scored(raw, token, p.logprobs))
        enough = len(c.generated) >= p.min_tokens
        text, pieces = "", Piece("")
        if enough and (token in (p.stop_token_ids or ()) or (token == EOS and not p.ignore_eos)):
            c.reason, c.stop_reason = "stop", None if token == EOS else token
            c.stream.skip()
        else:
            pieces = c.stream.push(token)
            text = pieces.text
        if pieces.stop is not None:
            c.reason, c.stop_reason = "stop", pieces.stop
        elif c.reason is None and len(c.generated) >= limit:
            c.reason = "length"
        if c.reason is not None and pieces.stop is None:
            text += c.stream.flush().text
        c.text += text
        new = tuple(c.logprobs[-1:]) if p.logprobs is not None else None
        return CompletionOutput(c.index, text, (token,), c.likelihood, new, c.reason, c.stop_reason)

    def _all(self, c: Choice, p: SamplingParams) -> CompletionOutput:
        scores = tuple(c.logprobs) if p.logprobs is not None else None
        return CompletionOutput(c.index, c.text, tuple(c.generated), c.likelihood, scores, c.reason, c.stop_reason)

    def _sample(self, c: Choice, p: SamplingParams, scores: list[float]) -> int:
        if self.script is not None:
            said = self.tokenizer.encode(self.script, add_special_tokens=False)
            return said[len(c.generated)] if len(c.generated) < len(said) else EOS
        for token, bias in (p.logit_bias or {}).items():
            scores[token] += bias
        for token in set(c.generated):
            times = c.generated.count(token)
            scores[token] -= p.presence_penalty + times * p.frequency_penalty
        if len(c.generated) < p.min_tokens:
            for token in (EOS, *(p.stop_token_ids or ())):
                scores[token] = -math.inf
        if p.allowed_token_ids is not None:
            scores = [s if t in p.allowed_token_ids else -math.inf for t, s in enumerate(scores)]
        best = max(range(VOCAB), key=scores.__getitem__)
        if p.greedy or p.top_k == 1 or p.top_p < 0.01:
            return best
        weights = [math.exp((s - scores[best]) / p.temperature) for s in scores]
        return c.draw.choices(range(VOCAB), weights)[0]

    def _prompt_scores(self, prompt: list[int], top: int) -> list[TokenLogprobs | None]:
        return [None, *(_scored(logits(a), b, top) for a, b in itertools.pairwise(prompt))]


def _scored(scores: list[float], token: int, top: int) -> TokenLogprobs:
    total = math.log(sum(map(math.exp, scores)))
    order = sorted(range(VOCAB), key=lambda t: -scores[t])
    text = FakeTokenizer().token_bytes
    found = {token: Logprob(scores[token] - total, order.index(token) + 1, text(token).decode("utf-8", "replace"))}
    for rank, other in enumerate(order[:top], start=1):
        found.setdefault(other, Logprob(scores[other] - total, rank, text(other).decode("utf-8", "replace")))
    return found


def wait_for(condition, seconds: float = 5.0) -> None:
    """Polls from a thread until the condition holds."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.01)
