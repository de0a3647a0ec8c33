"""Text to tokens by a server's pages, by a file, and by words."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from server.bench.vocabulary import FileVocabulary, ServerVocabulary, WordVocabulary
from tests.server.bench.replay import replaying
from tests.server.conftest import make_service
from tests.server.fake_engine import BOS, FakeEngine


def test_by_the_pages_of_this_server(live) -> None:
    found = ServerVocabulary(live(make_service(FakeEngine())).url, {}, "toy")
    assert found.encode("ab") == [BOS, 97, 98]
    assert found.encode("ab", False) == [97, 98]
    assert found.decode([97, 98]) == "ab"
    found.close()


def answer(body: object, status: str = "200 OK") -> list[bytes]:
    data = json.dumps(body).encode()
    return [b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(data), data)]


def test_by_the_pages_of_llama_cpp() -> None:
    async def asking() -> list[bytes]:
        refusal = answer({}, "400 Bad Request")
        speaks = (answer({"tokens": [1, 2]}), answer({"content": "two words"}))
        async with replaying(refusal, *speaks, answer({"tokens": [3]})) as (url, replay):
            found = await asyncio.to_thread(ServerVocabulary, url, {}, "toy")
            assert await asyncio.to_thread(found.encode, "x") == [3]
            found.close()
            return replay.requests

    requests = asyncio.run(asking())
    assert json.loads(requests[-1].partition(b"\r\n\r\n")[2]) == {"content": "x", "add_special": True}


def test_a_connection_that_was_closed_meanwhile_is_opened_again() -> None:
    async def asking() -> int:
        speaks = (answer({"tokens": [1, 2]}), answer({"prompt": "two words"}))
        async with replaying(*speaks, answer({"tokens": [3]}), close=True) as (url, replay):
            found = await asyncio.to_thread(ServerVocabulary, url, {}, "toy")
            assert await asyncio.to_thread(found.encode, "x") == [3]
            found.close()
            return replay.connections

    assert asyncio.run(asking()) == 3


def test_a_server_without_such_pages_is_told() -> None:
    with pytest.raises(ValueError, match="has no /tokenize"):
        ServerVocabulary("http://127.0.0.1:1", {}, "toy")


def test_by_a_file(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"one": 0, "two": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        found = FileVocabulary(str(name))
        assert (found.encode("two one"), found.decode([0, 1])) == ([1, 0], "one two")


def test_by_words() -> None:
    found = WordVocabulary()
    assert found.encode("b a b") == [0, 1, 0]
    assert found.decode(found.encode("a  new\nword")) == "a new word"
