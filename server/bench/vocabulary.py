"""Text to tokens and back, for prompts of a given length: by a tokenizer's file, by the server that is measured, or,
where neither is to be had, by words.
"""

from __future__ import annotations

import http.client
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import msgspec
from tokenizers import Tokenizer

_SECONDS = 60.0


class Vocabulary(Protocol):
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class FileVocabulary:
    """A tokenizer.json, of a directory or of a Hugging Face id."""

    def __init__(self, name: str) -> None:
        """Reads the file, or fetches it.

        Raises:
            ValueError: there is none.
        """
        path = Path(name)
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            self._tokenizer = Tokenizer.from_file(str(file)) if file.exists() else Tokenizer.from_pretrained(name)
        except Exception as error:  # what the library raises has no narrower type
            raise ValueError(f"no tokenizer.json can be read from {name}: {error}") from None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Text(msgspec.Struct):
    prompt: str | None = None
    content: str | None = None


class ServerVocabulary:
    """/tokenize and /detokenize of a server, with vLLM's fields or llama.cpp's."""

    def __init__(self, url: str, headers: Mapping[str, str], model: str) -> None:
        """Tries both kinds of fields.

        Raises:
            ValueError: the server has no such pages.
        """
        parts = urlsplit(url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._http = kind(parts.hostname or "", parts.port, timeout=_SECONDS)
        self._path, self._headers, self._model = parts.path.rstrip("/"), dict(headers), model
        self._as_vllm = True
        if not self._speaks():
            self._as_vllm = False
            if not self._speaks():
                self._http.close()
                raise ValueError("the server has no /tokenize and /detokenize")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if self._as_vllm:
            asked = {"model": self._model, "prompt": text, "add_special_tokens": add_special_tokens}
        else:
            asked = {"content": text, "add_special": add_special_tokens}
        return msgspec.json.decode(self._post("/tokenize", asked), type=_Tokens).tokens

    def decode(self, ids: Sequence[int]) -> str:
        named = {"model": self._model} if self._as_vllm else {}
        found = msgspec.json.decode(self._post("/detokenize", {**named, "tokens": list(ids)}), type=_Text)
        return found.prompt or found.content or ""

    def close(self) -> None:
        self._http.close()

    def _speaks(self) -> bool:
        try:
            ids = self.encode("two words", False)
            return bool(ids) and self.decode(ids).strip() == "two words"
        except (OSError, ValueError):
            return False

    def _post(self, path: str, asked: Mapping[str, object]) -> bytes:
        """Once more where the connection breaks: servers close those that were idle for some seconds."""
        try:
            status, data = self._exchange(path, asked)
        except (OSError, http.client.HTTPException):
            self._http.close()
            try:
                status, data = self._exchange(path, asked)
            except (OSError, http.client.HTTPException) as error:
                self._http.close()
                raise ConnectionError(f"{path} does not answer ({error})") from None
        if status != 200:
            raise ValueError(f"{path} answers with status {status}")
        return data

    def _exchange(self, path: str, asked: Mapping[str, object]) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json", **self._headers}
        self._http.request("POST", self._path + path, msgspec.json.encode(asked), headers)
        response = self._http.getresponse()
        return response.status, response.read()


class WordVocabulary:
    """Words as tokens: near enough where prompts are of common words. The server's own count is what is reported."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._words: list[str] = []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        found: list[int] = []
        for word in text.split():
            if word not in self._ids:
                self._ids[word] = len(self._words)
                self._words.append(word)
            found.append(self._ids[word])
        return found

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self._words[i] for i in ids)
