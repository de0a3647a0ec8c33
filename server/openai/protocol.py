"""What OpenAI's clients send and expect, as records. Names and defaults are OpenAI's, the extras vLLM's.

Only shapes and simple ranges are here; what a field means is decided where it is used.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from jaxserve.types import FinishReason

type Text256 = Annotated[str, Meta(min_length=1, max_length=256)]
type Count = Annotated[int, Meta(ge=0)]
type Json = object
"""A JSON value that is only passed on."""


class StreamOptions(Struct, kw_only=True, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(Struct, kw_only=True, frozen=True):
    """The fields that chat and completions share. None: not given."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    request_id: Text256 | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class CompletionRequest(SamplingFields, kw_only=True, frozen=True):
    prompt: str | list[int | str | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None


class ContentPart(Struct, kw_only=True, frozen=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class Message(Struct, kw_only=True, frozen=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Json] | None = None
    tool_call_id: str | None = None
    function_call: Json | None = None


class ChatFields(Struct, kw_only=True, frozen=True):
    """How messages become a prompt."""

    messages: list[Message]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Json] | None = None


class ChatRequest(SamplingFields, kw_only=True, frozen=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Json] | None = None

    def chat(self) -> ChatFields:
        return ChatFields(
            messages=self.messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            add_special_tokens=self.add_special_tokens,
            chat_template_kwargs=self.chat_template_kwargs,
        )


class TokenizeRequest(Struct, kw_only=True, frozen=True):
    """A prompt or messages, exactly one of them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Json] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True, frozen=True):
    tokens: list[int]
    model: str | None = None


class TokenizeReply(Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeReply(Struct, frozen=True):
    prompt: str


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int


class Usage(Struct, kw_only=True, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(Struct, frozen=True):
    logprob: float
    rank: int | None
    decoded_token: str | None


type PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(Struct, frozen=True):
    """One entry a token in each list; `text_offset` counts characters from the beginning of the choice's text."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct, kw_only=True, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Struct, kw_only=True, frozen=True):
    """An answer, or (with some choices and perhaps no usage) a chunk of one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | None = None


class TopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    content: list[ChatLogprob]
    refusal: None = None


class ChatMessage(Struct, kw_only=True, frozen=True):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(Struct, kw_only=True, frozen=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatCompletion(Struct, kw_only=True, frozen=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = None
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatDelta(Struct, kw_only=True, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct, kw_only=True, frozen=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatChunk(Struct, kw_only=True, frozen=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | None = None
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


class ModelPermission(Struct, kw_only=True, frozen=True):
    id: str
    object: Literal["model_permission"] = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelCard(Struct, kw_only=True, frozen=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "jaxserve"
    root: str
    parent: str | None = None
    max_model_len: int
    permission: list[ModelPermission]


class ModelList(Struct, kw_only=True, frozen=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]
