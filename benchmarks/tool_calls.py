"""A running server before 200 questions of the Berkeley Function Calling Leaderboard, to be answered by tool calls.

    python benchmarks/tool_calls.py --fetch FOLDER
    jaxserve serve --deterministic --port 8000 &
    python benchmarks/tool_calls.py FOLDER --base-url http://127.0.0.1:8000

Every question is asked twice, whole and streamed, with `tool_choice: required`. The two answers must be the same, every
call must name a tool of the question, and its arguments must match that tool's schema; otherwise it ends with status 1.
Whether the call is the one that the question wants is not looked at. Without --deterministic two answers may differ
because other requests shared their steps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

SOURCE = "bfcl-eval==2026.3.23"
CATEGORIES = ("simple_python", "multiple", "parallel", "parallel_multiple")
"""One tool and one call; several tools; several calls; both."""
QUESTIONS = 200
MAX_TOKENS = 256

TYPES = {"dict": "object", "float": "number", "tuple": "array"}
"""Of the leaderboard, in the words of JSON Schema; `any` is the absence of a type."""

type Json = bool | int | float | str | list[Json] | dict[str, Json] | None
type Schema = dict[str, Json]


@dataclass(frozen=True)
class Question:
    name: str
    messages: list[Json]
    tools: dict[str, Schema]
    """Parameters by the tool's name."""
    descriptions: dict[str, str]


@dataclass
class Call:
    name: str
    arguments: str


@dataclass
class Answer:
    content: str = ""
    calls: list[Call] = field(default_factory=list[Call])
    finish_reason: str = ""


@dataclass(frozen=True)
class Verdict:
    question: str
    calls: int
    """Complete ones."""
    cut: bool
    """The answer ended by length."""
    faults: list[str]


class Malformed(Exception):
    """A response that is no answer."""


def fetch(folder: Path) -> None:
    """Puts the leaderboard's questions into `folder`."""
    with tempfile.TemporaryDirectory() as place:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", place]
        subprocess.run([*pip, SOURCE], check=True)
        folder.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(next(Path(place).glob("*.whl"))) as wheel:
            for category in CATEGORIES:
                name = _file(category)
                (folder / name).write_bytes(wheel.read(f"bfcl_eval/data/{name}"))


def _file(category: str) -> str:
    return f"BFCL_v4_{category}.json"


def questions_of(folder: Path, count: int) -> list[Question]:
    """The same ones every time: equally many of each category, spread over its file."""
    share = count // len(CATEGORIES)
    found: list[Question] = []
    for category in CATEGORIES:
        lines = (folder / _file(category)).read_text().splitlines()
        found += [_question(json.loads(lines[i * len(lines) // share])) for i in range(share)]
    return found


def _question(line: dict[str, Json]) -> Question:
    match line:
        case {"id": str(name), "question": [[*messages]], "function": [*functions]}:
            tools: dict[str, Schema] = {}
            descriptions: dict[str, str] = {}
            for function in functions:
                match function:
                    case {"name": str(tool), "description": str(description), "parameters": dict(parameters)}:
                        tool = tool.replace(".", "_")  # OpenAI's names have no dots
                        tools[tool], descriptions[tool] = as_json_schema(parameters), description
                    case _:
                        raise ValueError(f"{name}: no tool: {function}")
            return Question(name, messages, tools, descriptions)
        case _:
            raise ValueError(f"not a question of one turn: {str(line)[:200]}")


def as_json_schema(schema: Schema) -> Schema:
    """With JSON Schema's names for the types, down to the last property."""
    found: Schema = {}
    for keyword, value in schema.items():
        match keyword, value:
            case "type", "any":
                continue
            case "type", str(name):
                found[keyword] = TYPES.get(name, name)
            case "properties", dict(properties):
                found[keyword] = {name: as_json_schema(p) for name, p in properties.items() if isinstance(p, dict)}
            case "items" | "additionalProperties", dict(inner):
                found[keyword] = as_json_schema(inner)
            case _:
                found[keyword] = value
    return found


async def check(http: httpx.AsyncClient, model: str, question: Question, turn: asyncio.Semaphore) -> Verdict:
    body: dict[str, Json] = {
        "model": model,
        "messages": question.messages,
        "tools": [
            {
                "type": "function",
                "function": {"name": name, "description": question.descriptions[name], "parameters": p},
            }
            for name, p in question.tools.items()
        ],
        "tool_choice": "required",
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
    }
    async with turn:
        try:
            whole = await ask(http, body)
            streamed = await ask_streamed(http, body)
        except (httpx.HTTPError, Malformed, LookupError, TypeError, ValueError) as error:
            return Verdict(question.name, 0, False, [repr(error)])
    complete, faults = judge(question, whole)
    if streamed != whole:
        faults.append(f"streamed {streamed} is not {whole}")
    return Verdict(question.name, complete, whole.finish_reason == "length", faults)


async def ask(http: httpx.AsyncClient, body: dict[str, Json]) -> Answer:
    response = await http.post("/v1/chat/completions", json=body)
    if response.is_error:
        raise Malformed(f"status {response.status_code}: {response.text}")
    choice = response.json()["choices"][0]
    message = choice["message"]
    calls = [Call(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or []]
    return Answer(message["content"] or "", calls, choice["finish_reason"])


async def ask_streamed(http: httpx.AsyncClient, body: dict[str, Json]) -> Answer:
    answer = Answer()
    async with http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
        if response.is_error:
            await response.aread()
            raise Malformed(f"status {response.status_code}: {response.text}")
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return answer
            if not line:
                continue
            if not (choices := json.loads(line.removeprefix("data: ")).get("choices")):
                raise Malformed(line)
            _add(answer, choices[0])
    raise Malformed("a stream stopped before its end")


def _add(answer: Answer, choice: dict[str, Json]) -> None:
    """Takes in a piece, whose calls must come in order, each with its id and name first and only there."""
    match choice:
        case {"delta": dict(delta), "finish_reason": str() | None as finish_reason}:
            pass
        case _:
            raise Malformed(f"no delta: {choice}")
    if answer.finish_reason:
        raise Malformed(f"after the end came {choice}")
    answer.finish_reason = finish_reason or ""
    if isinstance(content := delta.get("content"), str):
        answer.content += content
    calls = delta.get("tool_calls")
    for piece in calls if isinstance(calls, list) else []:
        match piece:
            case {"index": int(index), "id": str(), "function": {"name": str(name), **rest}} if index == len(
                answer.calls
            ):
                answer.calls.append(Call(name, ""))
            case {"index": int(index), "function": {**rest}} if index == len(answer.calls) - 1 and not rest.get("name"):
                pass
            case _:
                raise Malformed(f"no piece of a call: {piece}, after {len(answer.calls)} calls")
        if isinstance(arguments := rest.get("arguments"), str):
            answer.calls[-1].arguments += arguments


def judge(question: Question, answer: Answer) -> tuple[int, list[str]]:
    """How many calls are complete, and what is wrong. In an answer cut by length the last call may be incomplete."""
    faults: list[str] = []
    cut = answer.finish_reason == "length"
    if not cut and answer.finish_reason != "tool_calls":
        faults.append(f"finish_reason {answer.finish_reason!r}")
    if not cut and not answer.calls:
        faults.append("no call")
    if answer.content:
        faults.append(f"content beside the calls: {answer.content!r}")
    complete = 0
    for call in answer.calls:
        try:
            arguments: Json = json.loads(call.arguments)
        except ValueError:
            if not cut or call is not answer.calls[-1]:
                faults.append(f"arguments are not JSON: {call}")
            continue
        complete += 1
        if call.name not in question.tools:
            faults.append(f"no such tool: {call}")
        elif error := best_match(Draft202012Validator(question.tools[call.name]).iter_errors(arguments)):
            faults.append(f"{error.message}: {call}")
    return complete, faults


async def run(base_url: str, model: str, questions: Sequence[Question], concurrency: int) -> list[Verdict]:
    """In the order of the questions; what is done so far is told on stderr."""
    turn = asyncio.Semaphore(concurrency)
    done: list[Verdict] = []
    async with httpx.AsyncClient(base_url=base_url, timeout=600) as http:

        async def one(question: Question) -> Verdict:
            verdict = await check(http, model, question, turn)
            done.append(verdict)
            faulty = sum(bool(v.faults) for v in done)
            print(f"{len(done)} of {len(questions)}, {faulty} at fault", file=sys.stderr, flush=True)
            return verdict

        return await asyncio.gather(*(one(question) for question in questions))


def words(verdicts: Sequence[Verdict]) -> Iterator[str]:
    for verdict in verdicts:
        for fault in verdict.faults:
            yield f"FAULT {verdict.question}: {fault[:600]}"
    faulty = sum(bool(verdict.faults) for verdict in verdicts)
    yield f"{len(verdicts)} questions, each whole and streamed: {sum(v.calls for v in verdicts)} complete calls,"
    yield f"{sum(v.cut for v in verdicts)} answers cut by length, {faulty} at fault"


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks tool calls of a running server with the questions of BFCL.")
    parser.add_argument("data", type=Path, nargs="?", help="folder of the questions")
    parser.add_argument("--fetch", type=Path, metavar="FOLDER", help="download the questions to there, and end")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--questions", type=int, default=QUESTIONS)
    parser.add_argument("--concurrency", type=int, default=8)
    flags = parser.parse_args()
    if flags.fetch is not None:
        fetch(flags.fetch)
        return 0
    if flags.data is None:
        parser.error("give the folder of the questions, which --fetch downloads")
    began = time.monotonic()
    verdicts = asyncio.run(
        run(flags.base_url, flags.model, questions_of(flags.data, flags.questions), flags.concurrency)
    )
    print(*words(verdicts), sep="\n")
    print(f"{time.monotonic() - began:.0f} s")
    return 1 if any(verdict.faults for verdict in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
