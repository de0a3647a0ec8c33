"""`jaxserve chat`: a conversation with a running server, in the terminal. Standard library only."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from server.flags import KEY_VARIABLES

with contextlib.suppress(ImportError):
    import readline as _line_editing  # noqa: F401  # pyright: ignore[reportUnusedImport]

HINT = "Ctrl-C stops an answer, /new starts afresh, Ctrl-D leaves"
CONNECT_SECONDS = 10.0
TEMPERATURE = 0.3
LONGEST = 1024
"""Pieces of an answer that are read where no --max-tokens is given: small models may never come to an end."""


class ChatError(Exception):
    """Something the user should read."""


@dataclass(slots=True)
class Conversation:
    """What was said, and to whom."""

    url: str
    key: str
    model: str
    system: str | None
    options: dict[str, float]
    messages: list[dict[str, str]] = field(default_factory=list[dict[str, str]])

    def restart(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def ask(self, text: str) -> Iterator[str]:
        """The answer, piece by piece; it stays in the conversation as far as it came, the question only with it."""
        self.messages.append({"role": "user", "content": text})
        body: dict[str, object] = {"model": self.model, "messages": self.messages, "stream": True, **self.options}
        said: list[str] = []
        try:
            for count, (content, thought) in enumerate(_stream(self, body), start=1):
                said.append(content)
                yield content + (_dimmed(thought) if thought else "")
                if count == LONGEST and "max_tokens" not in self.options:
                    yield " [cut; --max-tokens allows longer answers]"
                    return
        finally:
            if any(said):
                self.messages.append({"role": "assistant", "content": "".join(said)})
            else:
                self.messages.pop()


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    parser.add_argument("--api-key", metavar="KEY", help=f"default: the variable {' or '.join(KEY_VARIABLES)}")
    parser.add_argument("--model", metavar="NAME", help="default: the first one that is served")
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    parser.add_argument("--temperature", type=float, default=TEMPERATURE, metavar="N", help=f"default: {TEMPERATURE}")
    parser.add_argument("--max-tokens", type=int, metavar="N", help=f"default: answers are cut after {LONGEST}")


def chat(flags: argparse.Namespace) -> int:
    """Talks until the end of the input; returns the process's exit status."""
    key = flags.api_key or next((k for name in KEY_VARIABLES if (k := os.environ.get(name))), "")
    url = str(flags.url).rstrip("/").removesuffix("/v1")
    options = {name: v for name in ("temperature", "max_tokens") if (v := getattr(flags, name)) is not None}
    talk = Conversation(url, key, flags.model or "", flags.system, options)
    talk.restart()
    try:
        _wait_until_ready(talk)
        talk.model = talk.model or _first_model(talk)
        if sys.stdin.isatty():
            print(f"{talk.model} on {talk.url}. {HINT}.")
        _converse(talk)
    except ChatError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print()
    return 0


def _converse(talk: Conversation) -> None:
    """Turns until the end of the input."""
    prompt = "\n> " if sys.stdin.isatty() else ""
    while True:
        try:
            text = input(prompt).strip()
        except EOFError:
            return
        if text == "/new":
            talk.restart()
        elif text:
            _show(talk.ask(text))


def _show(answer: Iterator[str]) -> None:
    try:
        for piece in answer:
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    except ChatError as error:
        if not sys.stdin.isatty():
            raise
        print(f"error: {error}", end="")
    print(flush=True)


def _wait_until_ready(talk: Conversation) -> None:
    """Waits while the server loads its model, and says how far it is."""
    told = ""
    while True:
        status, data = _get(talk, "/health")
        state = _as_object(data)
        if status != 503 or state.get("status") != "loading":
            break
        stage = str(state.get("stage"))
        if stage != told:
            print(f"the server is loading: {stage} ...", file=sys.stderr)
            told = stage
        time.sleep(0.5)
    if status != 200:
        raise ChatError(f"{talk.url} is not well: {_told(status, data)}")


def _first_model(talk: Conversation) -> str:
    status, data = _get(talk, "/v1/models")
    models = _as_object(data).get("data")
    if status != 200 or not isinstance(models, list) or not models:
        raise ChatError(_told(status, data))
    first: object = models[0]  # pyright: ignore[reportUnknownVariableType]
    return str(first["id"]) if isinstance(first, dict) and "id" in first else ""  # pyright: ignore[reportUnknownArgumentType]


def _dimmed(thought: str) -> str:
    return f"\x1b[2m{thought}\x1b[0m" if sys.stdout.isatty() else thought


def _stream(talk: Conversation, body: dict[str, object]) -> Iterator[tuple[str, str]]:
    """What events say, and what they say that the model thinks; leaving early ends the request."""
    with _connection(talk.url, None) as connection:
        response = _send(connection, talk, "POST", "/v1/chat/completions", json.dumps(body).encode())
        if response.status != 200:
            raise ChatError(_told(response.status, response.read()))
        try:
            for line in response:
                data = line.strip().removeprefix(b"data: ")
                if data == b"[DONE]":
                    return
                if data:
                    yield _text_of(data)
        except (OSError, http.client.HTTPException) as error:
            raise ChatError(f"the server went away in the middle of an answer ({error})") from None


def _text_of(data: bytes) -> tuple[str, str]:
    """New content and new reasoning of an event."""
    event = _as_object(data)
    if "error" in event:
        raise ChatError(_told(200, data))
    match event:
        case {"choices": [{"delta": {"reasoning": str(thought)}}]}:
            return "", thought
        case {"choices": [{"delta": {"content": str(text)}}]}:
            return text, ""
        case _:
            return "", ""


def _get(talk: Conversation, path: str) -> tuple[int, bytes]:
    with _connection(talk.url, CONNECT_SECONDS) as connection:
        response = _send(connection, talk, "GET", path, None)
        return response.status, response.read()


@contextlib.contextmanager
def _connection(url: str, seconds: float | None) -> Generator[http.client.HTTPConnection]:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ChatError(f"--url must look like http://127.0.0.1:8000, got {url}")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=seconds)
    try:
        yield connection
    finally:
        connection.close()


def _send(
    connection: http.client.HTTPConnection, talk: Conversation, method: str, path: str, body: bytes | None
) -> http.client.HTTPResponse:
    headers = {"Content-Type": "application/json"} if body is not None else {}
    if talk.key:
        headers["Authorization"] = f"Bearer {talk.key}"
    try:
        connection.request(method, urlsplit(talk.url).path + path, body, headers)
        return connection.getresponse()
    except (OSError, http.client.HTTPException) as error:
        raise ChatError(f"no server answers at {talk.url} ({error}); start one with `jaxserve serve`") from None


def _told(status: int, data: bytes) -> str:
    """The message of an error in OpenAI's shape."""
    match _as_object(data):
        case {"error": {"message": str(message)}}:
            return message
        case _:
            return f"status {status}"


def _as_object(data: bytes) -> dict[str, object]:
    try:
        found: object = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}  # pyright: ignore[reportUnknownVariableType]
