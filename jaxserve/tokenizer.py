"""Text to tokens and back, for a model directory or a GGUF file.

Encoding and decoding go straight to the tokenizers library, which is thread-safe and lets go of the interpreter lock;
chat templates are rendered by transformers, whose behaviour they are written for. transformers takes a second to
import, so that happens when a tokenizer is built, in the thread that builds it. Knows no model and no request.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Protocol

from tokenizers import Tokenizer as Backend
from tokenizers import normalizers, pre_tokenizers
from tokenizers.decoders import DecodeStream

from jaxserve.weights.readers import gguf

Message = Mapping[str, object]
"""A chat message: "role", "content", and what else the template knows."""

SEED_TOKENS = 8
"""Tokens of the prompt that a stream looks at: enough for a character that begins in the prompt."""

_RESERVED = frozenset(
    (
        *("conversation", "messages", "tools", "documents", "chat_template"),
        *("add_generation_prompt", "continue_final_message", "sanitize_control_tokens"),
        *("tokenize", "tokenizer_kwargs", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask"),
    )
)
"""Names that cannot be template variables, because the renderer has parameters of these names."""


class Pretrained(Protocol):
    """What is used of a transformers tokenizer."""

    backend_tokenizer: Backend
    chat_template: str | dict[str, str] | None
    bos_token_id: int | None
    eos_token_id: int | None
    special_tokens_map: Mapping[str, object]

    def apply_chat_template(self, conversation: list[dict[str, object]], **kwargs: object) -> str: ...


class Tokenizer:
    """A vocabulary, its special tokens and its chat template. Every method may be called from any thread."""

    def __init__(self, fast: Pretrained, chat_template: str | None = None) -> None:
        """`chat_template`: a file or the template itself, instead of the tokenizer's own.

        Raises:
            ValueError: the chat template file cannot be read.
        """
        if chat_template is not None:
            fast.chat_template = read_template(chat_template)
        self._fast = fast
        self._backend = fast.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._spelling = _Spelling(self._backend)
        self.max_chars_per_token = max(len(token) for token in self._vocabulary)
        """A text of n characters has at least n / max_chars_per_token tokens."""
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        """Tokens that `skip_special_tokens` leaves out."""

    @classmethod
    def load(cls, path: Path, *, chat_template: str | None = None, metadata: gguf.Metadata | None = None) -> Tokenizer:
        """The tokenizer in a model directory or a GGUF file.

        `metadata`: the GGUF file's, where somebody has read it, which takes a while.

        Raises:
            ValueError: there is none, or it cannot be read; the message names the path.
        """
        if path.is_file():
            return cls(_from_gguf(path, gguf.read_metadata(path) if metadata is None else metadata), chat_template)
        return cls(_from_directory(path), chat_template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Special tokens written in the text become their ids; `add_special_tokens` adds the model's own."""
        # A batch of one, because that leaves the GIL to other threads while a long text is encoded.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text; ids that do not exist have none."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def stream(self, *, skip_special_tokens: bool = True, prompt: Sequence[int] = ()) -> TokenStream:
        """Decodes one token after the other. `prompt`: what came before the first one."""
        return TokenStream(self._backend, skip_special_tokens, prompt[-SEED_TOKENS:])

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt for a conversation. `kwargs`: more variables for the template. `chat_template`: text, not a file.

        The text holds the model's special tokens already: encode it with `add_special_tokens=False`, or use
        `encode_chat`.

        Raises:
            ValueError: there is no template, or it fails on this conversation; the template's own words.
        """
        if not chat_template and not self._fast.chat_template:
            raise ValueError("the model has no chat template; start with --chat-template FILE")
        reserved = sorted(_RESERVED & (kwargs or {}).keys())
        if reserved:
            raise ValueError(f"chat_template_kwargs must not hold {', '.join(reserved)}")
        try:
            return self._fast.apply_chat_template(
                [dict(m) for m in messages],
                tools=None if tools is None else [dict(t) for t in tools],
                documents=None if documents is None else [dict(d) for d in documents],
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **(kwargs or {}),
            )
        except Exception as e:  # a template is a program: it may fail in any way
            raise ValueError(f"chat template: {e}") from e

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        kwargs: Mapping[str, object] | None = None,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Token ids of `apply_chat_template`."""
        text = self.apply_chat_template(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            tools=tools,
            documents=documents,
            kwargs=kwargs,
        )
        return self.encode(text, add_special_tokens)

    @property
    def chat_template(self) -> str | None:
        """The template in use; where a model has several, the default one."""
        return self.template_for(tools=False)

    def template_for(self, *, tools: bool) -> str | None:
        """The template for a conversation with or without tools; most models have one for both."""
        template = self._fast.chat_template
        if not isinstance(template, dict):
            return template
        return (template.get("tool_use") if tools else None) or template.get("default")

    @property
    def template_variables(self) -> Mapping[str, object]:
        """What every chat template may use besides the conversation: `bos_token` and the like."""
        return self._fast.special_tokens_map

    def definition(self) -> str:
        """The whole tokenizer in the tokenizers library's JSON."""
        return self._backend.to_str()

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id, added tokens included."""
        return max(self._vocabulary.values()) + 1

    @property
    def eos_token_id(self) -> int | None:
        return self._fast.eos_token_id

    @property
    def bos_token_id(self) -> int | None:
        return self._fast.bos_token_id

    def token_text(self, token: int) -> str:
        """The token alone, its leading space kept; half characters become U+FFFD, special tokens their name."""
        return self.token_bytes(token).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """What the token adds to the UTF-8 of a text; a special token's name; nothing for an id that does not exist."""
        return self._spelling.bytes_of(token)

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
        return self._backend.get_vocab(with_added_tokens=True)


class TokenStream:
    """Text as its tokens come. Not thread-safe; one per sequence."""

    def __init__(self, backend: Backend, skip_special_tokens: bool, seed: Sequence[int]) -> None:
        self._backend = backend
        self._skip = skip_special_tokens
        self._before: list[int] = []
        """Tokens whose text has left: what the next ones are read after."""
        self._pending: list[int] = []
        self._stream = DecodeStream(ids=[], skip_special_tokens=skip_special_tokens)
        for token in seed:
            self._next(token)
        self._before = list(seed)

    def step(self, token: int) -> str | None:
        """The text that this token completes, or None while a character is incomplete."""
        self._pending.append(token)
        text = self._next(token)
        if text is not None:
            self._before, self._pending = self._pending, []
        return text

    def flush(self) -> str:
        """The text of tokens whose last character never became complete."""
        if not self._pending:
            return ""
        whole = self._decode(self._before + self._pending)
        said = self._decode(self._before)
        self._before, self._pending = self._pending, []
        return whole[len(said) :]

    def _next(self, token: int) -> str | None:
        try:
            return self._stream.step(self._backend, token)
        except Exception:  # the decoder loses its place when text before this token changes; it begins anew
            self._stream = DecodeStream(ids=[], skip_special_tokens=self._skip)
            return self._stream.step(self._backend, token)

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=self._skip)


class _Spelling:
    """How a vocabulary writes bytes: GPT-2's alphabet (ByteLevel), or sentencepiece's ▁ for a space and <0xNN>."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._added = {id: token.content.encode() for id, token in backend.get_added_tokens_decoder().items()}
        kinds = set(_decoder_kinds(backend))
        self._alphabet = _byte_alphabet() if "ByteLevel" in kinds else None
        self._fallback = "ByteFallback" in kinds
        self._space = "▁" if kinds & {"Metaspace", "Replace"} else None

    def bytes_of(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token]
        text = self._backend.id_to_token(token)
        if text is None:
            return b""
        if self._alphabet is not None:
            known = all(c in self._alphabet for c in text)
            return bytes(self._alphabet[c] for c in text) if known else text.encode()
        if self._fallback and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return bytes.fromhex(text[3:5])
        return (text if self._space is None else text.replace(self._space, " ")).encode()


def read_template(template: str) -> str:
    """A chat template given as itself or as the name of its file.

    Raises:
        ValueError: it looks like a file name, but there is no such file.
    """
    if "{" in template:
        return template
    try:
        return Path(template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeError) as e:
        raise ValueError(
            f"chat_template {template[:200]!r} is neither a Jinja template nor a readable file: {e}"
        ) from e


def _decoder_kinds(backend: Backend) -> Iterator[str]:
    """The types of a tokenizer's decoders."""
    if backend.decoder is None:
        return
    pending = [json.loads(backend.decoder.__getstate__())]
    while pending:
        decoder = pending.pop()
        yield decoder["type"]
        pending += decoder.get("decoders", [])


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary: itself if printable, else 256 and up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def _transformers(module: str = "transformers") -> ModuleType:
    """Imported late: it takes a second, and without this setting it tells everybody that PyTorch is missing."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    return importlib.import_module(module)


def _from_directory(path: Path) -> Pretrained:
    try:
        fast = _transformers().AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as e:  # files that are missing or damaged fail in many ways
        why = " ".join(str(e).split())
        raise ValueError(f"{path} holds no readable tokenizer ({why}); give one with --tokenizer") from e
    if not getattr(fast, "is_fast", False):
        raise ValueError(f"the tokenizer in {path} has no tokenizer.json and cannot be converted; give another")
    return fast


# GGUF: the vocabulary is metadata, the rest follows from two names, `model` and `pre`

_DIGITS_FIRST = frozenset(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"))
"""Every digit is a piece of its own before text is split into words."""

_WHOLE_WORDS = frozenset(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken"))
"""A word that is a token is taken as it is, even if no sequence of merges makes it."""

_COMPOSED = frozenset(("qwen2", "deepseek-r1-qwen"))
"""Text is normalised to NFC."""

_NAMED_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _from_gguf(path: Path, metadata: gguf.Metadata) -> Pretrained:
    if "tokenizer.ggml.tokens" not in metadata:
        raise ValueError(f"{path} holds no tokenizer; give one with --tokenizer")
    mapping = _transformers("transformers.integrations.gguf.gguf_tokenizer_mapping")
    names = mapping.GGUF_TOKENIZER_MAPPING["tokenizer"]
    fields = {new: metadata[f"tokenizer.{key}"] for key, new in names.items() if f"tokenizer.{key}" in metadata}
    try:
        backend, _ = mapping.convert_gguf_tokenizer(str(metadata["general.architecture"]), fields)
    except (ValueError, KeyError) as e:
        raise ValueError(f"{path}: its tokenizer cannot be read ({e}); give one with --tokenizer") from e
    backend = _without_strangers(backend)
    pre = str(fields.get("pre_tokenizer_type", ""))
    _refine(backend, pre)
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _NAMED_TOKENS.items()}
    starts = fields.get("tokenizer_type") == "llama" or pre in _WHOLE_WORDS
    return _transformers().PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=_gguf_templates(metadata),
        add_bos_token=metadata.get("tokenizer.ggml.add_bos_token", starts),
        add_eos_token=metadata.get("tokenizer.ggml.add_eos_token", False),
        clean_up_tokenization_spaces=False,
        **{name: backend.id_to_token(id) for name, id in ids.items() if isinstance(id, int)},
    )


def _without_strangers(backend: Backend) -> Backend:
    """Without the tokens that a class of transformers takes for granted, but the file does not have."""
    size = backend.get_vocab_size(with_added_tokens=False)
    if all(id < size for id in backend.get_added_tokens_decoder()):
        return backend
    state = json.loads(backend.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < size]
    return Backend.from_str(json.dumps(state))


def _refine(backend: Backend, pre: str) -> None:
    """What transformers leaves out for some vocabularies."""
    if pre in _DIGITS_FIRST:
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    if pre in _WHOLE_WORDS:
        backend.model.ignore_merges = True
    if pre in _COMPOSED:
        backend.normalizer = normalizers.NFC()


def _gguf_templates(metadata: Mapping[str, object]) -> str | dict[str, str] | None:
    """The one template, or all of them by name."""
    prefix = "tokenizer.chat_template"
    default = metadata.get(prefix)
    named = {key[len(prefix) + 1 :]: str(metadata[key]) for key in metadata if key.startswith(prefix + ".")}
    if not named:
        return None if default is None else str(default)
    return named if default is None else {"default": str(default), **named}
