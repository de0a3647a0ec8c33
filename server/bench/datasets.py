"""What is asked: random prompts, prompts with common beginnings, conversations from a file, prompts from a file.

Prompts are text of common words, cut to the very number of tokens by the vocabulary at hand. The same seed draws the
same samples.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from server.bench.answers import Sample
from server.bench.vocabulary import Vocabulary

NAMES = ("random", "sharegpt", "prefix_repetition", "custom")
TRIES = 8
"""Texts that are drawn for a length, until one has it exactly."""
SHORTEST, LONGEST_PROMPT, LONGEST = 4, 1024, 2048
"""Conversations of a file with fewer or more tokens than these are left out, as vLLM does."""

WORDS = """time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work government number night point home water room mother
area money story fact month lot right study book eye job word business issue side kind head house service friend
father power hour game line end member law car city community name president team minute idea body information back
parent face others level office door health person art war history party result change morning reason research girl
guy moment air teacher force education foot boy age policy music process mind food sense table season paper space
ground form event official matter center couple site project activity star need court oil half situation cost
industry figure street image phone data picture practice piece land product doctor wall patient worker news test
movie north love support technology step south west east summer light garden river mountain bridge window kitchen
winter spring letter animal color dinner island stone forest engine circle machine market nature ocean pattern
planet quality record signal station subject surface theory unit value village weather yellow green blue small
large early late open quiet simple strong warm clear deep free full happy high low new short slow sure whole""".split()


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Which samples are drawn, with vLLM's names and defaults.

    Raises:
        ValueError: a value is impossible; the message names the flag.
    """

    dataset_name: str = "random"
    dataset_path: str | None = None
    num_prompts: int = 1000
    seed: int = 0
    disable_shuffle: bool = False
    no_oversample: bool = False
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    random_prefix_len: int = 0
    sharegpt_output_len: int | None = None
    custom_output_len: int = 256
    prefix_repetition_prefix_len: int = 256
    prefix_repetition_suffix_len: int = 256
    prefix_repetition_num_prefixes: int = 10
    prefix_repetition_output_len: int = 128

    def __post_init__(self) -> None:
        for name, value in ((f, getattr(self, f)) for f in self.__dataclass_fields__):
            low = 0 if name in ("seed", "random_prefix_len") else 1
            if isinstance(value, int) and not isinstance(value, bool) and value < low:
                raise ValueError(f"{_flag(name)} must be at least {low}, got {value}")
        if not 0 <= self.random_range_ratio < 1:
            raise ValueError(f"--random-range-ratio must be in [0, 1), got {self.random_range_ratio}")
        if self.dataset_name in ("sharegpt", "custom") and self.dataset_path is None:
            raise ValueError(f"--dataset-name {self.dataset_name} needs a file, --dataset-path")
        if self.dataset_name in ("random", "prefix_repetition") and self.dataset_path is not None:
            raise ValueError(f"--dataset-path is of no use for --dataset-name {self.dataset_name}; remove it")
        if self.dataset_name == "prefix_repetition" and self.num_prompts < self.prefix_repetition_num_prefixes:
            raise ValueError("--num-prompts must be at least --prefix-repetition-num-prefixes")

    def again(self, turn: int, num_prompts: int | None = None) -> Dataset:
        """Other samples of the same kind: what a server has cached of one turn is of no use in another."""
        count = self.num_prompts if num_prompts is None else num_prompts
        prefixes = min(self.prefix_repetition_num_prefixes, count)
        return replace(
            self, seed=self.seed + 1_000_003 * turn, num_prompts=count, prefix_repetition_num_prefixes=prefixes
        )

    def draw(self, vocabulary: Vocabulary) -> list[Sample]:
        """As many samples as are wanted, the same ones each time.

        Raises:
            ValueError: the file cannot be read, or has nothing that fits.
        """
        match self.dataset_name:
            case "random":
                return self._random(vocabulary)
            case "prefix_repetition":
                return self._repetitions(vocabulary)
            case "sharegpt":
                return self._enough(self._conversations(vocabulary))
            case _:
                return self._enough(self._lines(vocabulary))

    def _random(self, vocabulary: Vocabulary) -> list[Sample]:
        rng = random.Random(self.seed)
        composer = Composer(vocabulary, rng)
        common = composer.text(self.random_prefix_len)[0] if self.random_prefix_len else ""
        samples: list[Sample] = []
        for _ in range(self.num_prompts):
            wanted = self.random_prefix_len + self._around(rng, self.random_input_len)
            output = self._around(rng, self.random_output_len)
            samples.append(Sample(*composer.text(wanted, common), output))
        return samples

    def _around(self, rng: random.Random, length: int) -> int:
        low = math.floor(length * (1 - self.random_range_ratio))
        return rng.randint(max(low, 1), max(math.ceil(length * (1 + self.random_range_ratio)), 1))

    def _repetitions(self, vocabulary: Vocabulary) -> list[Sample]:
        rng = random.Random(self.seed)
        composer = Composer(vocabulary, rng)
        prefix, suffix = self.prefix_repetition_prefix_len, self.prefix_repetition_suffix_len
        openings = [composer.text(prefix)[0] for _ in range(self.prefix_repetition_num_prefixes)]
        samples = [
            Sample(*composer.text(prefix + suffix, openings[i % len(openings)]), self.prefix_repetition_output_len)
            for i in range(self.num_prompts)
        ]
        if not self.disable_shuffle:
            rng.shuffle(samples)
        return samples

    def _conversations(self, vocabulary: Vocabulary) -> Iterator[Sample]:
        """First questions, with answers as long as those that were given."""
        try:
            found = msgspec.json.decode(self._file(), type=list[_Conversation])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{self.dataset_path} is no file of conversations: {error}") from None
        told = [c.conversations for c in found if len(c.conversations) >= 2]
        for question, answer, *_ in self._shuffled(told):
            prompt = len(vocabulary.encode(question.value))
            output = self.sharegpt_output_len or len(vocabulary.encode(answer.value, False))
            fits = prompt <= LONGEST_PROMPT and prompt + output <= LONGEST
            if fits and prompt >= SHORTEST and (self.sharegpt_output_len or output >= SHORTEST):
                yield Sample(question.value, prompt, output)

    def _lines(self, vocabulary: Vocabulary) -> Iterator[Sample]:
        lines = [line for line in self._file().splitlines() if line.strip()]
        asked: list[_Line] = []
        for number, line in enumerate(lines, start=1):
            try:
                asked.append(msgspec.json.decode(line, type=_Line))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ValueError(f"line {number} of {self.dataset_path}: {error}") from None
        for one in self._shuffled(asked):
            yield Sample(one.prompt, len(vocabulary.encode(one.prompt)), one.output_tokens or self.custom_output_len)

    def _file(self) -> bytes:
        try:
            return Path(str(self.dataset_path)).read_bytes()
        except OSError as error:
            raise ValueError(f"cannot read {self.dataset_path}: {error.strerror}") from None

    def _shuffled[T](self, found: Sequence[T]) -> list[T]:
        order = list(found)
        if not self.disable_shuffle:
            random.Random(self.seed).shuffle(order)
        return order

    def _enough(self, found: Iterator[Sample]) -> list[Sample]:
        """As many as are wanted; where a file has fewer, they come round again."""
        samples = [sample for sample, _ in zip(found, range(self.num_prompts), strict=False)]
        if not samples:
            raise ValueError(f"{self.dataset_path} has no prompt that fits")
        if self.no_oversample:
            return samples
        return [samples[i % len(samples)] for i in range(self.num_prompts)]


class _Said(msgspec.Struct):
    value: str = ""


class _Conversation(msgspec.Struct):
    conversations: list[_Said] = msgspec.field(default_factory=list[_Said])


class _Line(msgspec.Struct):
    prompt: str
    output_tokens: int | None = None


class Composer:
    """Texts of random words with a given number of tokens, those that the vocabulary adds by itself included."""

    def __init__(self, vocabulary: Vocabulary, rng: random.Random) -> None:
        self._vocabulary, self._rng = vocabulary, rng
        self._added = len(vocabulary.encode("a")) - len(vocabulary.encode("a", False))

    def text(self, tokens: int, opening: str = "") -> tuple[str, int]:
        """A text that begins with `opening`, and its tokens: `tokens`, or as near as some tries come."""
        wanted = max(tokens - self._added, 1)
        best, length = "", -1
        for _ in range(TRIES):
            words = " ".join(self._rng.choices(WORDS, k=wanted))
            ids = self._vocabulary.encode(f"{opening} {words}" if opening else words, False)
            text = self._vocabulary.decode(ids[:wanted])
            count = len(self._vocabulary.encode(text, False))
            if length < 0 or abs(count - wanted) < abs(length - wanted):
                best, length = text, count
            if length == wanted:
                break
        return best, length + self._added


_HELP = {
    "dataset_name": "what is asked",
    "dataset_path": 'for sharegpt a JSON file, for custom lines of {"prompt": ..., "output_tokens": ...}',
    "num_prompts": "requests",
    "seed": "of samples and arrivals",
    "disable_shuffle": "files are read from their beginning",
    "no_oversample": "a file with fewer prompts makes fewer requests, instead of coming round again",
    "random_input_len": "tokens of a prompt, beside the common prefix",
    "random_output_len": "tokens of an answer",
    "random_range_ratio": "lengths are drawn from length * (1 - ratio) to length * (1 + ratio)",
    "random_prefix_len": "tokens that all prompts begin with",
    "sharegpt_output_len": "tokens of an answer, instead of as many as the file's",
    "custom_output_len": "tokens of an answer where the line says nothing",
    "prefix_repetition_prefix_len": "tokens of a common beginning",
    "prefix_repetition_suffix_len": "tokens after it",
    "prefix_repetition_num_prefixes": "different beginnings",
    "prefix_repetition_output_len": "tokens of an answer",
}


_INPUT_LEN = {"random": "random_input_len", "prefix_repetition": "prefix_repetition_suffix_len"}


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("dataset")
    for name, told in _HELP.items():
        default = Dataset.__dataclass_fields__[name].default
        shown = f"{told} (default: {default})" if default is not None else told
        if isinstance(default, bool):
            group.add_argument(_flag(name), action="store_true", default=None, help=told)
        elif name == "dataset_name":
            group.add_argument(_flag(name), choices=NAMES, help=shown)
        elif name == "dataset_path":
            group.add_argument(_flag(name), metavar="FILE", help=shown)
        else:
            group.add_argument(_flag(name), type=float if isinstance(default, float) else int, metavar="N", help=shown)
    group.add_argument("--input-len", type=int, metavar="N", help="--random-input-len, or the suffix of a repetition")
    group.add_argument("--output-len", type=int, metavar="N", help="tokens of an answer, for every kind of data set")


def read_flags(flags: argparse.Namespace) -> Dataset:
    """What the flags of `add_flags` say.

    Raises:
        ValueError: a value is impossible, or of no use for this data set; the message names the flag.
    """
    given: dict[str, object] = {name: value for name in _HELP if (value := getattr(flags, name)) is not None}
    kind = str(given.get("dataset_name", "random"))
    for name in given:
        if any(name.startswith(f"{other}_") for other in NAMES if other != kind):
            raise ValueError(f"{_flag(name)} is of no use for --dataset-name {kind}; remove it")
    if flags.input_len is not None:
        if kind not in _INPUT_LEN:
            raise ValueError(f"--input-len is of no use for --dataset-name {kind}; remove it")
        given[_INPUT_LEN[kind]] = flags.input_len
    if flags.output_len is not None:
        given[f"{kind}_output_len"] = flags.output_len
    return Dataset(**given)  # type: ignore[arg-type]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
