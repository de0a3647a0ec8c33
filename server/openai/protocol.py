"""What OpenAI's clients send and expect, as records. Names and defaults are OpenAI's, the extras vLLM's.

Only shapes and simple ranges are here; what a field means is decided where it is used.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from jaxserve.types import MAX_N, FinishReason

type Text256 = Annotated[str, Meta(min_length=1, max_length=256)]
type Count = Annotated[int, Meta(ge=0)]
type Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
type Json = object
"""A JSON value that is only passed on."""
type ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StreamOptions(Struct, kw_only=True, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class StructuredOutputs(Struct, kw_only=True, frozen=True):
    """What an answer must look like: exactly one of the first six."""

    json: str | bool | dict[str, Json] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Json] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class JsonSchemaFormat(Struct, kw_only=True, frozen=True):
    name: str | None = None
    description: str | None = None
    schema: bool | dict[str, Json] | None = None
    strict: bool | None = None
    """The schema is enforced either way."""


class ResponseFormat(Struct, kw_only=True, frozen=True):
    """OpenAI's way to ask for JSON, and vLLM's for structural tags."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: list[Json] | None = None
    triggers: list[str] | None = None
    format: Json | None = None


class SamplingFields(Struct, kw_only=True, frozen=True):
    """The fields that chat and completions share. None: not given."""

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    max_tokens: Count | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=-1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Int64 | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    request_id: Text256 | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None


class CompletionRequest(SamplingFields, kw_only=True, frozen=True):
    prompt: str | list[int | str | list[int]]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None


ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
type Role = Annotated[str, Meta(extra_json_schema={"enum": list(ROLES)})]
type PartType = Annotated[str, Meta(extra_json_schema={"enum": list(TEXT_PARTS)})]
"""These two are checked where messages are read, which can say of which one it is."""


class ContentPart(Struct, kw_only=True, frozen=True):
    type: PartType
    text: str | None = None
    refusal: str | None = None


class Message(Struct, kw_only=True, frozen=True):
    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Json]] | None = None
    tool_call_id: str | None = None
    function_call: Json | None = None


class ChatFields(Struct, kw_only=True, frozen=True):
    """How messages become a prompt."""

    messages: list[Message]
    tools: list[dict[str, Json]] | None = None
    documents: list[dict[str, Json]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Json] | None = None
    reasoning_effort: ReasoningEffort | None = None


class ChatRequest(SamplingFields, kw_only=True, frozen=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    echo: bool | None = None
    tools: list[dict[str, Json]] | None = None
    tool_choice: str | dict[str, Json] | None = None
    parallel_tool_calls: bool | None = None
    documents: list[dict[str, Json]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Json] | None = None
    include_reasoning: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    thinking_token_budget: int | None = None

    def chat(self) -> ChatFields:
        return ChatFields(
            messages=self.messages,
            tools=self.tools,
            documents=self.documents,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            add_special_tokens=self.add_special_tokens,
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
            reasoning_effort=self.reasoning_effort,
        )


class TokenizeRequest(Struct, kw_only=True, frozen=True):
    """A prompt or messages, exactly one of them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Json]] | None = None
    documents: list[dict[str, Json]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Json] | None = None
    reasoning_effort: ReasoningEffort | None = None
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


class CompletionTokensDetails(Struct, frozen=True):
    reasoning_tokens: int


class Usage(Struct, kw_only=True, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class RequestMetrics(Struct, kw_only=True, frozen=True):
    """How long an answer took, all its choices together."""

    time_to_first_token_ms: float
    """From the request's arrival, waiting included."""
    queue_time_ms: float
    """From the arrival until the first prompt was taken up."""
    generation_time_ms: float
    """From then until the last token."""
    mean_itl_ms: float | None
    """Between the tokens of the longest choice; null where it has one token."""
    tokens_per_second: float
    """Of all choices, within the generation time."""


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
    metrics: RequestMetrics | UnsetType = UNSET


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


type ChatFinish = FinishReason | Literal["tool_calls"]


class FunctionCall(Struct, kw_only=True, frozen=True):
    name: str
    arguments: str
    """JSON."""


class ToolCall(Struct, kw_only=True, frozen=True):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Struct, kw_only=True, frozen=True):
    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True, frozen=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinish | None = None
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
    metrics: RequestMetrics | UnsetType = UNSET


class FunctionDelta(Struct, kw_only=True, frozen=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(Struct, kw_only=True, frozen=True):
    """A piece of call `index`; the first one has id, type and name, the later ones only more arguments."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class ChatDelta(Struct, kw_only=True, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct, kw_only=True, frozen=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinish | None = None
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
    metrics: RequestMetrics | UnsetType = UNSET


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
