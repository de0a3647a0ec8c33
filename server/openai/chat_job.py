"""A chat request, checked and made ready for the engine: its prompt, its parameters, and how its answers are told."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from jaxserve.types import CompletionOutput, InvalidRequest, RequestOutput, SamplingParams, StructuredOutputsParams
from server.errors import bad_request
from server.openai.conversation import Conversation, conversation
from server.openai.dialect import spelling
from server.openai.generating import Count, Names, start
from server.openai.logprobs import chat_logprobs
from server.openai.messages import checked
from server.openai.params import sampling_params
from server.openai.prompts import Prompt, Wish, answer_room, maybe_in_thread, truncated
from server.openai.protocol import ChatLogprobs, ChatRequest, CompletionTokensDetails, Usage
from server.openai.speaking import Manner, Speaker
from server.openai.structured import wanted
from server.openai.tools import ToolUse, tool_use
from server.service import Engine, Service


@dataclass(frozen=True, slots=True)
class Job:
    """A checked request."""

    request: ChatRequest
    engine: Engine
    names: Names
    prompt: Prompt
    params: SamplingParams
    manner: Manner
    thinking_end: str | None
    timed: bool
    """The answer tells how long it took."""

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """What the engine says. Close it to abort."""
        started = start(self.engine, self.names, self.request, [self.prompt], [self.params], self.thinking_end)
        async with aclosing(started) as outputs:
            try:
                async for found in outputs:
                    yield found
            except InvalidRequest as error:
                if self.manner.enforces and (error.param or "").startswith("structured_outputs"):
                    raise bad_request(f"tools: {error}", "tools") from None
                raise

    def count(self) -> Count:
        return Count(len(self.prompt.ids))

    def speaker(self) -> Speaker:
        return Speaker(self.manner, self.engine.tokenizer)

    def usage(self, count: Count, speakers: list[Speaker]) -> Usage:
        found = count.usage()
        if self.manner.dialect.reasoning is None:
            return found
        details = CompletionTokensDetails(sum(speaker.reasoning_tokens for speaker in speakers))
        return msgspec.structs.replace(found, completion_tokens_details=details)

    def logprobs(self, piece: CompletionOutput) -> ChatLogprobs | None:
        if piece.logprobs is None:
            return None
        as_ids = bool(self.request.return_tokens_as_token_ids)
        top = self.request.top_logprobs or 0
        return chat_logprobs(piece.token_ids, piece.logprobs, top, self.engine.tokenizer, as_ids)


async def prepared(asked: ChatRequest, service: Service, names: Names) -> Job:
    """The request as a job, which the engine may be given at once.

    An answer whose shape is the caller's (`structured_outputs`, `response_format`) holds no calls, only content.

    Raises:
        ApiError: 400, something in it is wrong or cannot be served; 503, too much waits already.
    """
    engine = service.ready()
    if asked.top_logprobs and not asked.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    use = tool_use(asked.tools, asked.tool_choice, asked.parallel_tool_calls)
    if use.mode == "auto" and not service.server.enable_auto_tool_choice:
        message = "tool_choice auto, the default with tools, needs the server's --enable-auto-tool-choice"
        raise bad_request(message, "tool_choice")
    own = wanted(asked)
    if own is not None and use.forced:
        message = "tool_choice cannot demand calls of an answer that structured_outputs or response_format shapes"
        raise bad_request(message, "tool_choice")
    if own is not None:
        use = replace(use, mode="none")
    talk = await conversation(asked.chat(), use, service, whole=asked.truncate_prompt_tokens is None)
    if asked.thinking_token_budget is not None and talk.dialect.reasoning is None:
        message = "thinking_token_budget needs a model that thinks, or a --reasoning-parser that knows how it does"
        raise bad_request(message, "thinking_token_budget")
    manner = _manner(asked, use, talk, service.server.response_role)
    wish = _wish(asked, engine)
    prompt = truncated(talk.prompt, asked, wish, engine.max_model_len)
    shape = await _grammar(manner, service) if manner.enforces else own
    params = _params(asked, engine, manner, answer_room(prompt, wish, engine.max_model_len), shape)
    service.admit(names.id, [prompt.ids], [params])
    thoughts = talk.dialect.reasoning
    thinking_end = thoughts.end if thoughts is not None and talk.thinks else None
    return Job(asked, engine, names, prompt, params, manner, thinking_end, service.server.enable_per_request_metrics)


def _manner(asked: ChatRequest, use: ToolUse, talk: Conversation, role: str) -> Manner:
    last = asked.messages[-1]
    if asked.continue_final_message:
        role = last.role
    return Manner(
        dialect=talk.dialect,
        use=use,
        opened=talk.opened,
        finds_calls=use.mode != "none",
        with_reasoning=asked.include_reasoning is not False,
        hides_specials=asked.skip_special_tokens is not False,
        tells_stop=bool(asked.include_stop_str_in_output),
        role=role,
        said=str(checked([last])[0]["content"]) if asked.echo and last.role == role else "",
    )


def _params(
    asked: ChatRequest, engine: Engine, manner: Manner, room: int, shape: StructuredOutputsParams | None
) -> SamplingParams:
    wish = _wish(asked, engine)
    if room == 0:
        raise bad_request(f"{wish.tokens_name} must be at least 1", wish.tokens_name)
    found = sampling_params(
        asked,
        engine,
        max_tokens=room,
        logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
        prompt_logprobs=asked.prompt_logprobs,
        logprobs_name="top_logprobs",
        structured=shape,
        thinking_token_budget=asked.thinking_token_budget,
    )
    needed = found.skip_special_tokens and manner.wants_specials(engine.tokenizer)
    return found.clone(skip_special_tokens=False) if needed else found


async def _grammar(manner: Manner, service: Service) -> StructuredOutputsParams:
    """What calls may look like; written beside the event loop where the tools' schemas are large."""
    use, spell = manner.use, partial(spelling, tokenizer=service.ready().tokenizer)
    write = partial(manner.dialect.tools.grammar, use.callable, required=use.forced, parallel=use.parallel, spell=spell)
    size = len(msgspec.json.encode([tool.parameters for tool in use.callable]))
    try:
        return StructuredOutputsParams(grammar=await maybe_in_thread(service, size, write))
    except ValueError as error:
        raise bad_request(f"tools: {error}", "tools") from None


def _wish(asked: ChatRequest, engine: Engine) -> Wish:
    """The newer of OpenAI's two names wins."""
    usual = engine.default_params.get("max_tokens")
    default = usual if isinstance(usual, int) else None
    if asked.max_completion_tokens is not None:
        return Wish(asked.max_completion_tokens, default, "max_completion_tokens", "messages")
    return Wish(asked.max_tokens, default, "max_tokens", "messages")
