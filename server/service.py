"""One engine on its way up, at work, or gone: the state that every route sees, owned here.

The two protocols are all that the server asks of the engine and of the tokenizer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.types import RequestOutput, SamplingParams
from server.errors import ApiError
from server.limits import QueueLimits
from server.template_process import TemplateProcess

log = logging.getLogger("jaxserve.server")

MAX_PROMPTS_LOGGED = 20
MAX_NAMES_LOGGED = 500
"""Unknown request fields that are remembered as logged."""


class Tokenizer(Protocol):
    """`jaxserve.tokenizer.Tokenizer`, as far as it is used here. Every method may be called from any thread."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token: int) -> bytes:
        """What the token adds to the UTF-8 of a text; a special token's name."""
        ...

    @property
    def special_ids(self) -> frozenset[int]: ...
    @property
    def max_chars_per_token(self) -> int: ...
    @property
    def template_variables(self) -> Mapping[str, object]: ...

    def template_for(self, *, tools: bool) -> str | None: ...

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
        """Raises ValueError: there is no template, or it refuses the messages."""
        ...


class Engine(Protocol):
    """`jaxserve.AsyncEngine`, as far as it is used here."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_logprobs(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def default_params(self) -> Mapping[str, object]: ...
    @property
    def dead(self) -> BaseException | None: ...

    def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        thinking_end: str | None = None,
    ) -> AsyncGenerator[RequestOutput]: ...

    def waiting_with(self, sequences: int, tokens: int) -> tuple[int, int]:
        """Sequences, and tokens of their prompts, that would wait for a row if so many came now."""
        ...

    def close(self) -> None: ...


class Service:
    """Loading (with progress), ready (`engine` is set), or failed (`failure` is set)."""

    def __init__(self, config: EngineConfig, server: ServerConfig) -> None:
        self.config = config
        self.server = server
        self.created = int(time.time())
        self.names = config.served_model_name or (config.model,)
        self.stage = "starting"
        self.progress = 0.0
        """Share of the stage that is done, 0..1."""
        self.engine: Engine | None = None
        self.failure: BaseException | None = None
        self.limits = QueueLimits(server)
        self.templates = TemplateProcess()
        self.answering = 0
        """HTTP requests that wait for an answer, or for the rest of one; counted only where /load shows it."""
        self._stopping: asyncio.Future[None] | None = None
        self._logged: set[str] = set()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenise")

    def report(self, stage: str, progress: float = 0.0) -> None:
        """How far loading is; from any thread."""
        self.stage, self.progress = stage, progress

    @property
    def dead(self) -> BaseException | None:
        """Why nothing can be served any more."""
        return self.failure or (self.engine.dead if self.engine is not None else None)

    def ready(self) -> Engine:
        """The engine.

        Raises:
            ApiError: 503, it is not ready yet, or dead.
        """
        if self.dead is not None:
            raise ApiError(503, "the engine has failed; the server is going down", code="engine_dead")
        if self.engine is None:
            done = f"{self.stage}, {self.progress:.0%}" if self.progress else self.stage
            raise ApiError(503, f"the model is loading: {done}", code="loading", headers={"Retry-After": "1"})
        return self.engine

    async def in_thread[T](self, work: Callable[[], T]) -> T:
        """Runs work that would hold up other requests."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    @property
    def stopping(self) -> asyncio.Future[None]:
        """Done when running requests must end now."""
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_future()
        return self._stopping

    def stop(self) -> None:
        """Ends the running requests with an error."""
        if not self.stopping.done():
            self.stopping.set_result(None)

    def admit(self, request_id: str, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> None:
        """Lets a checked request through to the engine, which must be given all of its prompts at once.

        Raises:
            ApiError: 503, too much waits already.
        """
        engine = self.ready()
        sizes = [(own.n, own.n * len(prompt)) for prompt, own in zip(prompts, params, strict=True)]
        self.limits.admit(engine.waiting_with, sizes)
        if self.server.enable_log_requests:
            log.info(
                "request %r: prompts of %s tokens%s, %.2000s",
                request_id,
                ", ".join(str(len(prompt)) for prompt in prompts[:MAX_PROMPTS_LOGGED]),
                self._shown(prompts[0]),
                params[0],
            )

    def _shown(self, prompt: Sequence[int]) -> str:
        """The beginning of a prompt for the log, as text, if the log may hold prompts."""
        most = self.server.max_log_len
        if not most:
            return ""
        return f" {self.ready().tokenizer.decode(prompt[:most], skip_special_tokens=False)[:most]!r}"

    def check_model(self, name: str | None) -> str:
        """The name that the answer carries.

        Raises:
            ApiError: 404, this model is not served.
        """
        if name is not None and name not in self.names:
            raise ApiError(
                404,
                f"the model {name[:200]!r} is not served here; served: {', '.join(self.names)}",
                param="model",
                code="model_not_found",
            )
        return self.names[0] if name is None else name

    def log_unknown(self, names: Sequence[str]) -> None:
        """Says once for each name that requests carry a field nobody knows."""
        for name in names:
            if name not in self._logged and len(self._logged) < MAX_NAMES_LOGGED:
                self._logged.add(name)
                log.warning("request field %r is not known and has no effect", name[:100])
