"""`LLM`: the blocking Python API, with vLLM's names. Steps the engine in the caller's thread."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import jax
from flax import nnx
from tqdm import tqdm

from jaxserve.config import EngineConfig, ServerConfig, check_names, names_of, read_yaml, split
from jaxserve.launch import Launched, Progress, launch
from jaxserve.prompts import Prompt, TokensPrompt, bad_word_tokens, tokens_of
from jaxserve.tokenizer import Tokenizer
from jaxserve.types import Observer, Request, RequestOutput, SamplingParams

Messages = Sequence[Mapping[str, object]]


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
    ) -> list[RequestOutput]:
        """Answers in the order of the prompts, computed together.

        A prompt is a string, a list of token ids, {"prompt": ...} or {"prompt_token_ids": [...]}.

        Raises:
            ValueError: a prompt or a parameter cannot be served; nothing has been computed then.
        """
        many = _is_many(prompts)
        listed: list[Prompt] = list(prompts) if many else [prompts]  # type: ignore[arg-type, list-item]
        if priority is not None and len(priority) != len(listed):
            raise ValueError(f"priority has {len(priority)} entries for {len(listed)} prompts")
        requests = [
            self._request(prompt, params, 0 if priority is None else priority[i])
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
        chat_template_kwargs: Mapping[str, object] | None = None,
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
                kwargs=chat_template_kwargs,
            )
            for one in conversations
        ]
        tokens = [TokensPrompt(prompt=text, prompt_token_ids=self.tokenizer.encode(text, False)) for text in prompts]
        return self.generate(tokens, sampling_params, use_tqdm=use_tqdm)

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
        self, prompt: Prompt, params: SamplingParams, priority: int
    ) -> tuple[Request, tuple[tuple[int, ...], ...]]:
        text, ids = tokens_of(prompt, self.tokenizer)
        request = Request(str(next(self._ids)), ids, params, text, priority, arrival=time.monotonic())
        self._engine.check(request)
        return request, bad_word_tokens(params, self.tokenizer, self._engine.bounds)

    def _run(self, requests: list[tuple[Request, tuple[tuple[int, ...], ...]]], show: bool) -> list[RequestOutput]:
        done: dict[str, RequestOutput] = {}
        try:
            for request, banned in requests:
                self._engine.add(request, banned)
            with tqdm(total=len(requests), desc="requests", disable=not show) as bar:
                while len(done) < len(requests) or not all(out.finished for out in done.values()):
                    for new in self._engine.step():
                        old = done.get(new.request_id)
                        done[new.request_id] = new if old is None else old.joined(new)
                        bar.update(new.finished)
        except BaseException:
            for request, _ in requests:
                self._engine.abort(request.id)
            raise
        return [done[request.id] for request, _ in requests]


def _is_many(prompts: Prompt | Sequence[Prompt]) -> bool:
    """A list of token ids is one prompt."""
    if isinstance(prompts, str | dict):
        return False
    return not (prompts and isinstance(prompts[0], int))


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
