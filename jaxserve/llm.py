"""`LLM`: the blocking Python API, with vLLM's names. Steps the engine in the caller's thread."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import jax
from flax import nnx
from tqdm import tqdm

from jaxserve.beam import Beam, BeamSearch, BeamSearchOutput, BeamSearchSequence, ask, check_width, next_logprobs
from jaxserve.config import EngineConfig, ServerConfig, check_names, names_of, read_yaml, split
from jaxserve.deltas import Deltas
from jaxserve.grammar.compile import Grammar
from jaxserve.launching import Launched, Progress, launch
from jaxserve.prompts import Prompt, TokensPrompt, bad_word_tokens, tokens_of
from jaxserve.tokenizer import Tokenizer
from jaxserve.types import BeamSearchParams, Observer, Request, RequestOutput, SamplingParams

Messages = Sequence[Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class _Ready:
    """A request that the engine can take."""

    request: Request
    banned: tuple[tuple[int, ...], ...]
    grammar: Grammar | None


class LLM:
    """A model that is loaded and compiled, ready to answer. Keyword arguments are the flags' names.

    `with LLM(...) as llm:` frees the device memory at the end; so does `close()`.

    Raises:
        ValueError: an option is unknown or impossible, or the model cannot be loaded.
    """

    def __init__(self, model: str | None = None, *, observers: Iterable[Observer] = (), **options: object) -> None:
        if model is not None:
            options["model"] = model
        known = names_of(EngineConfig)
        check_names(list(options), known, "LLM(...)")
        config = EngineConfig(**{known[name].name: value for name, value in options.items()})  # type: ignore[arg-type]
        self._start(config, observers)

    @classmethod
    def from_config(cls, path: str | Path, **options: object) -> Self:
        """From a launch file; keyword arguments beat it. The server's options in the file are of no concern here."""
        known = names_of(EngineConfig, ServerConfig)
        check_names(list(options), known, "LLM.from_config(...)")
        merged = read_yaml(path) | {known[name].name: value for name, value in options.items()}
        llm = cls.__new__(cls)
        llm._start(split(merged)[0], ())
        return llm

    def _start(self, config: EngineConfig, observers: Iterable[Observer]) -> None:
        self._launched: Launched = launch(config, progress=_bar(), observers=observers)
        self._engine = self._launched.engine
        self._ids = itertools.count()

    @property
    def config(self) -> EngineConfig:
        """With what was left open filled in."""
        return self._launched.config

    @property
    def tokenizer(self) -> Tokenizer:
        return self._launched.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    @property
    def model(self) -> nnx.Module:
        """The Flax module, with the engine's own arrays: layers stacked along a first dimension."""
        return self._launched.model

    @property
    def params(self) -> list[jax.Array]:
        """The weights, flat: `jax.tree.leaves(llm.model)`, the very arrays that the engine uses."""
        return self._launched.executor.leaves

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's authors recommend, where its generation_config says so."""
        return SamplingParams(**self._launched.default_params)  # type: ignore[arg-type]

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        thinking_end: str | None = None,
    ) -> list[RequestOutput]:
        """Answers in the order of the prompts, computed together.

        A prompt is a string, a list of token ids, {"prompt": ...} or {"prompt_token_ids": [...]}. With `thinking_end`
        the answers begin by thinking, which this text ends: structured outputs and thinking budgets go by it.

        Raises:
            ValueError: a prompt or a parameter cannot be served; nothing has been computed then.
        """
        listed = _listed(prompts)
        if priority is not None and len(priority) != len(listed):
            raise ValueError(f"priority has {len(priority)} entries for {len(listed)} prompts")
        requests = [
            self._request(prompt, params, 0 if priority is None else priority[i], thinking_end)
            for i, (prompt, params) in enumerate(zip(listed, self._params(sampling_params, len(listed)), strict=True))
        ]
        return self._run(requests, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        thinking_end: str | None = None,
    ) -> list[RequestOutput]:
        """Like `generate`, for one conversation or a list of them, through the model's chat template."""
        first = messages[0] if messages else {}
        conversations = [messages] if isinstance(first, Mapping) else messages
        prompts = [
            self.tokenizer.apply_chat_template(
                list(one),  # type: ignore[arg-type]
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                kwargs=chat_template_kwargs,
            )
            for one in conversations
        ]
        tokens = [TokensPrompt(prompt=text, prompt_token_ids=self.tokenizer.encode(text, False)) for text in prompts]
        return self.generate(tokens, sampling_params, use_tqdm=use_tqdm, thinking_end=thinking_end)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, *, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """The likeliest answers to each prompt, best first, in the order of the prompts.

        Raises:
            ValueError: a prompt or a parameter cannot be served; nothing has been computed then.
        """
        bounds = self._engine.bounds
        check_width(params, bounds.max_logprobs)
        one = ask(params)
        prompt_ids = [self._request(prompt, one).request.prompt_ids for prompt in _listed(prompts)]
        searches = [BeamSearch(ids, params, bounds.eos, bounds.max_model_len - len(ids)) for ids in prompt_ids]
        with tqdm(total=params.max_tokens, desc="beam search", disable=not use_tqdm) as bar:
            while texts := {search: found for search in searches if (found := search.texts())}:
                answers = iter(self._run([self._request(t, one) for found in texts.values() for t in found], False))
                for search, found in texts.items():
                    search.advance([next_logprobs(next(answers)) for _ in found])
                bar.update()
        return [BeamSearchOutput([self._sequence(search, beam) for beam in search.beams()]) for search in searches]

    def close(self) -> None:
        """Frees the device memory; the object is of no use afterwards."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _params(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        if isinstance(given, SamplingParams):
            return [given] * count
        if len(given) != count:
            raise ValueError(f"sampling_params has {len(given)} entries for {count} prompts")
        return list(given)

    def _request(
        self, prompt: Prompt, params: SamplingParams, priority: int = 0, thinking_end: str | None = None
    ) -> _Ready:
        text, ids = tokens_of(prompt, self.tokenizer)
        number = str(next(self._ids))
        request = Request(number, ids, params, text, priority, arrival=time.monotonic(), thinking_end=thinking_end)
        self._engine.check(request)
        asked = params.structured_outputs
        return _Ready(
            request,
            bad_word_tokens(params, self.tokenizer, self._engine.bounds),
            None if asked is None else self._launched.grammars.submit(asked).result(),
        )

    def _sequence(self, search: BeamSearch, beam: Beam) -> BeamSearchSequence:
        count = len(beam.tokens) - (beam.ended and not search.params.include_stop_str_in_output)
        tokens = [*search.prompt, *beam.tokens[:count]]
        return BeamSearchSequence(
            tokens=tokens,
            text=self.tokenizer.decode(tokens, skip_special_tokens=False),
            cum_logprob=beam.cum_logprob,
            logprobs=list(beam.logprobs[:count]),
            finish_reason=beam.finish_reason,
        )

    def _run(self, requests: list[_Ready], show: bool) -> list[RequestOutput]:
        done = {ready.request.id: Deltas() for ready in requests}
        try:
            for ready in requests:
                self._engine.add(ready.request, ready.banned, ready.grammar)
            with tqdm(total=len(requests), desc="requests", disable=not show) as bar:
                unfinished = len(requests)
                while unfinished:
                    for new in self._engine.step():
                        done[new.request_id].add(new)
                        unfinished -= new.finished
                        bar.update(new.finished)
        except BaseException:
            for ready in requests:
                self._engine.abort(ready.request.id)
            raise
        return [deltas.whole() for deltas in done.values()]


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt is a list of one; a list of token ids is one prompt."""
    one = isinstance(prompts, str | dict) or bool(prompts and isinstance(prompts[0], int))
    return [prompts] if one else list(prompts)  # type: ignore[arg-type, list-item]


def _bar() -> Progress:
    """Progress on standard error, where it is a terminal."""
    bar = tqdm(total=100, desc="starting", disable=None, leave=False, bar_format="{desc} {percentage:3.0f}% {elapsed}")

    def tell(stage: str, share: float) -> None:
        bar.set_description_str(stage)
        bar.n = round(share * 100)
        bar.refresh()
        if stage == "warming up":
            bar.close()

    return tell
