"""From messages and tools to the prompt that the model's chat template makes of them.

Text is taken as it is written: a special token's name in a message becomes that token, as it does with transformers.
The server's own template is trusted: it renders here, in a thread where there is much to do. A template that a request
brings renders in a process of its own. Tools stand in the prompt also where `tool_choice` is none, as the template
writes them; in the words that stand in for a template without tools, they do not.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import cast

import msgspec

from server.errors import bad_request
from server.openai.dialect import Dialect, dialect_of
from server.openai.messages import Told, as_parts, checked, in_words, told, without_system
from server.openai.prompts import Prompt, check_length, maybe_in_thread, too_long
from server.openai.protocol import ChatFields, Json
from server.openai.tools import ToolUse
from server.service import Service
from server.template_process import Job

log = logging.getLogger("jaxserve.server")

MAX_TEMPLATE = 256 * 1024
"""Characters of a template that a request brings."""
MAX_TOOLS_BYTES = 1 << 20
PIECE_WORK = 40
"""Checking a message, a part or a call takes about as long as tokenising so many characters."""
_RESERVED = frozenset(
    """conversations conversation messages tools documents chat_template add_generation_prompt continue_final_message
    return_assistant_tokens_mask""".split()
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt, and what is known of the answer to it."""

    prompt: Prompt
    dialect: Dialect
    opened: bool
    """The prompt ends inside the model's thoughts."""
    thinks: bool
    """The model is expected to think first."""


@dataclass(frozen=True, slots=True)
class _Draft:
    """What a template is given."""

    messages: Sequence[Told]
    tools: Sequence[Mapping[str, Json]] | None


async def conversation(fields: ChatFields, use: ToolUse, service: Service, *, whole: bool = True) -> Conversation:
    """The messages through the chat template. `whole`: a prompt that is too long in any case is refused at once.

    Raises:
        ApiError: 400, messages that cannot be served, or that the template refuses.
    """
    _check(fields, service)
    engine = service.ready()
    text = fields.chat_template or engine.tokenizer.template_for(tools=bool(use.schemas))
    if text is None:
        raise bad_request("the model has no chat template; start with --chat-template FILE", "messages")
    options = service.server.tool_call_parser, service.server.reasoning_parser
    dialect = await maybe_in_thread(service, len(fields.chat_template or ""), lambda: dialect_of(text, *options))
    variables = _variables(fields, dialect, service)
    work = _pieces(fields) * PIECE_WORK + sum(len(msgspec.json.encode(m.tool_calls or ())) for m in fields.messages)
    drafts = await maybe_in_thread(service, work, lambda: _drafts(fields, use, dialect, service))
    if whole:
        _check_lengths(drafts[0].messages, service)
    rendered = await _text(fields, drafts, variables, service)
    if whole:
        check_length(rendered, service, "messages")
    special = bool(fields.add_special_tokens)
    ids = await maybe_in_thread(
        service, len(rendered), lambda: engine.tokenizer.encode(rendered, add_special_tokens=special)
    )
    if not ids:
        raise bad_request("messages become an empty prompt", "messages")
    opened = _opened(fields, rendered, dialect)
    thinks = opened or (not _goes_on(fields) and _thinks(rendered, dialect, service))
    return Conversation(Prompt(ids, rendered), dialect, opened, thinks)


def _opened(fields: ChatFields, rendered: str, dialect: Dialect) -> bool:
    """Whether the prompt ends inside thoughts: the template began them, or the message that the answer goes on with."""
    thoughts = dialect.reasoning
    if thoughts is None:
        return False
    said = _goes_on(fields)
    return said.rfind(thoughts.start) > said.rfind(thoughts.end) if said else thoughts.opened(rendered)


def _goes_on(fields: ChatFields) -> str:
    """What the message says that the answer is to continue; "" where it is a message of its own."""
    return str(checked(fields.messages[-1:])[0]["content"]).strip() if fields.continue_final_message else ""


def _thinks(rendered: str, dialect: Dialect, service: Service) -> bool:
    """Whether thoughts are to be expected of a model whose prompt does not begin them.

    Templates of models that do not think may still know how to leave out thoughts of earlier messages. What speaks for
    thinking is a switch or an effort in the template, or that the server was told how this model thinks.
    """
    template = dialect.template
    may = template.switch is not None or "reasoning_effort" in template.variables
    told = service.server.reasoning_parser is not None
    return dialect.reasoning is not None and (may or told) and dialect.reasoning.thinks(rendered)


def _check(fields: ChatFields, service: Service) -> None:
    if not fields.messages:
        raise bad_request("messages must not be empty", "messages")
    most = service.ready().max_model_len
    if (pieces := _pieces(fields)) > most:
        raise too_long(f"messages with {pieces} parts and calls have at least as many tokens", most, "messages")
    if fields.add_generation_prompt and fields.continue_final_message:
        message = "add_generation_prompt and continue_final_message cannot both be true"
        raise bad_request(message, "continue_final_message")
    size = len(msgspec.json.encode(fields.tools)) if fields.tools else 0
    if size > MAX_TOOLS_BYTES:
        raise bad_request(f"tools takes at most {MAX_TOOLS_BYTES} bytes of JSON, got {size}", "tools")
    template = fields.chat_template
    if template is None:
        return
    if not service.server.trust_request_chat_template:
        message = "chat_template is not taken from requests: the server needs --trust-request-chat-template"
        raise bad_request(message, "chat_template")
    if not 0 < len(template) <= MAX_TEMPLATE:
        rule = f"chat_template must have 1 to {MAX_TEMPLATE} characters, got {len(template)}"
        raise bad_request(rule, "chat_template")


def _check_lengths(messages: Sequence[Told], service: Service) -> None:
    for message in messages:
        content = message["content"]
        for text in [content] if isinstance(content, str) else [part["text"] for part in cast(list[Told], content)]:
            check_length(str(text), service, "messages")


def _pieces(fields: ChatFields) -> int:
    parts = sum(len(m.content) for m in fields.messages if isinstance(m.content, list))
    return len(fields.messages) + parts + sum(len(m.tool_calls or ()) for m in fields.messages)


def _variables(fields: ChatFields, dialect: Dialect, service: Service) -> dict[str, object]:
    """What the template may use: the server's defaults, then the reasoning effort, then the request's own."""
    given = {**(service.server.default_chat_template_kwargs or {}), **(fields.chat_template_kwargs or {})}
    reserved = sorted(_RESERVED & given.keys())
    if reserved:
        raise bad_request(f"chat_template_kwargs must not hold {', '.join(reserved)}", "chat_template_kwargs")
    defaults = service.server.default_chat_template_kwargs or {}
    return {**defaults, **_effort(fields, dialect), **(fields.chat_template_kwargs or {})}


def _effort(fields: ChatFields, dialect: Dialect) -> dict[str, object]:
    """The reasoning effort as the template takes it: as itself, as a switch that is off for none, or both.

    Where it takes neither, nothing could become of it. Then only none is accepted, of a model that does not think.
    """
    effort, template = fields.reasoning_effort, dialect.template
    if effort is None:
        return {}
    found: dict[str, object] = {"reasoning_effort": effort} if "reasoning_effort" in template.variables else {}
    if template.switch is not None:
        found[template.switch] = effort != "none"
    if not found and (effort != "none" or dialect.reasoning is not None):
        message = "reasoning_effort has no effect on this model, whose chat template does not take it: leave it out"
        raise bad_request(message, "reasoning_effort")
    return found


def _drafts(fields: ChatFields, use: ToolUse, dialect: Dialect, service: Service) -> list[_Draft]:
    """What to give the template; the later ones are for when it refuses the ones before."""
    template = dialect.template
    if fields.documents and "documents" not in template.variables:
        raise bad_request("documents have no place in this model's chat template: leave them out", "documents")
    about_tools = bool(use.schemas) or any(m.role == "tool" or m.tool_calls for m in fields.messages)
    form = service.server.chat_template_content_format
    if template.knows_tools or not about_tools:
        return [_Draft(told(fields.messages, template, form), use.schemas or None)]
    _say_in_words()
    messages = in_words(checked(fields.messages), use)
    found = [messages]
    if fields.messages[0].role not in ("system", "developer"):
        found.append(without_system(messages))
    parts = form == "openai" or not template.takes_strings
    return [_Draft(as_parts(m) if parts else m, None) for m in found]


@cache
def _say_in_words() -> None:
    log.warning("the chat template knows no tools: they and their calls are told to the model in plain messages")


async def _text(fields: ChatFields, drafts: Sequence[_Draft], variables: Mapping[str, object], service: Service) -> str:
    """The first draft that the template takes, as it writes it; the error of the first one if it takes none."""
    size = len(msgspec.json.encode((drafts[0].messages, drafts[0].tools, fields.documents, variables)))
    failure = ""
    for draft in drafts:
        try:
            if fields.chat_template is not None:
                return await _rendered_apart(fields, draft, variables, service)
            return await maybe_in_thread(service, size, partial(_rendered, fields, draft, variables, service))
        except ValueError as error:
            failure = failure or str(error)
    own = "messages" if fields.chat_template is None else "chat_template"
    raise bad_request(failure, "chat_template_kwargs" if failure.startswith("chat_template_kwargs") else own)


def _rendered(fields: ChatFields, draft: _Draft, variables: Mapping[str, object], service: Service) -> str:
    resume = bool(fields.continue_final_message)
    return service.ready().tokenizer.apply_chat_template(
        draft.messages,
        add_generation_prompt=not resume and fields.add_generation_prompt is not False,
        continue_final_message=resume,
        tools=draft.tools,
        documents=fields.documents,
        kwargs=variables,
    )


async def _rendered_apart(fields: ChatFields, draft: _Draft, variables: Mapping[str, object], service: Service) -> str:
    resume = bool(fields.continue_final_message)
    return await service.templates.render(
        Job(
            template=fields.chat_template or "",
            messages=list(draft.messages),
            tools=None if draft.tools is None else [dict(tool) for tool in draft.tools],
            documents=fields.documents,
            add_generation_prompt=not resume and fields.add_generation_prompt is not False,
            continue_final_message=resume,
            variables={**service.ready().tokenizer.template_variables, **variables},
        )
    )
