"""Measures a running server, any that speaks OpenAI's API: sends requests as they would come, and tells latencies.

Tokens are counted by the server's usage. Sampling is greedy unless --temperature says otherwise. Each rate of
--request-rates gets samples of its own, so that no rate profits from what another one has left in a prefix cache.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import msgspec
from tqdm import tqdm

from server.bench import arrivals, datasets, options, plot, report
from server.bench.answers import Load, Sample
from server.bench.client import Client, ClientError
from server.bench.command import BenchError
from server.bench.datasets import Dataset
from server.bench.endpoint import PATHS, Endpoint, told
from server.bench.summary import GOALS, METRICS, Summary, summarise
from server.bench.vocabulary import FileVocabulary, ServerVocabulary, Vocabulary, WordVocabulary
from server.flags import KEY_VARIABLES

if sys.platform == "win32":
    new_event_loop = asyncio.new_event_loop
else:
    from uvloop import new_event_loop

KEYS = (*KEY_VARIABLES, "OPENAI_API_KEY")
BUSY = 0.9
"""Of one core: a client that works more than this may be what limits."""
FIRST = Sample("Hello", 1, 1)
"""What readiness is asked with."""
_ASK_AGAIN_SECONDS = 1.0
_PASSING = {408, 425, 429}
"""Statuses below 500 that may be better a moment later."""
_SAMPLING = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "repetition_penalty": float,
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The flags, read and checked."""

    backend: str
    url: str
    path: str
    headers: Mapping[str, str]
    model: str | None
    served_model_name: str | None
    tokenizer: str | None
    dataset: Dataset
    rates: tuple[float, ...]
    burstiness: float
    ramp: arrivals.Ramp | None
    max_concurrency: int | None
    fields: Mapping[str, object]
    num_warmups: int
    patience: float
    metrics: tuple[str, ...]
    percentiles: tuple[float, ...]
    goals: Mapping[str, float]
    quiet: bool


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Where results go."""

    label: str | None
    metadata: Mapping[str, str]
    save: bool
    detailed: bool
    directory: Path
    filename: str | None
    plot: Path | None


@dataclass(frozen=True, slots=True)
class Point:
    """One rate, measured."""

    rate: float
    setting: report.Setting
    load: Load
    samples: Sequence[Sample]
    summary: Summary


def add_flags(parser: argparse.ArgumentParser) -> None:
    _add_target(parser.add_argument_group("server"))
    datasets.add_flags(parser)
    _add_load(parser.add_argument_group("load"))
    _add_sampling(parser.add_argument_group("requests"))
    _add_results(parser.add_argument_group("results"))


def run(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    flags = parser.parse_args(words)
    try:
        asked, outputs = _options(flags), _outputs(flags)
    except ValueError as error:
        parser.error(str(error))
    several = len(asked.rates) > 1
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        points = runner.run(measure(asked, outputs.label, lambda point: _save(point, outputs, several)))
    if outputs.plot is not None:
        _plot(points, outputs.plot)
    return 0 if all(point.summary.completed for point in points) else 1


async def measure(asked: Options, label: str | None, done: Callable[[Point], None]) -> list[Point]:
    """All rates, one after another; prints the report of each, and calls `done` with it.

    Raises:
        BenchError: the server is not ready in time, or the data set cannot be read.
    """
    with ExitStack() as closing:
        client = Client(asked.url, asked.headers)
        closing.callback(client.close)
        until = time.monotonic() + asked.patience
        model = asked.served_model_name or asked.model or await _served_model(client, until)
        counting = None if asked.tokenizer is None else _file_vocabulary(asked.tokenizer)
        endpoint = Endpoint(client, asked.path, asked.backend == "openai-chat", model, asked.fields, counting)
        if asked.patience:
            await _until_ready(endpoint, until)
        vocabulary = counting or await asyncio.to_thread(_server_vocabulary, asked, model, closing)
        await _warm_up(endpoint, asked, vocabulary)
        points: list[Point] = []
        for turn, rate in enumerate(asked.rates):
            setting = _setting(asked, label, asked.model or model, rate)
            points.append(await _measure_one(endpoint, asked, setting, vocabulary, turn))
            done(points[-1])
        return points


async def _measure_one(
    endpoint: Endpoint, asked: Options, setting: report.Setting, vocabulary: Vocabulary, turn: int
) -> Point:
    samples = await _draw(asked.dataset.again(turn), vocabulary)
    times = arrivals.offsets(len(samples), setting.rate, asked.burstiness, asked.dataset.again(turn).seed, asked.ramp)
    with tqdm(total=len(samples), desc="requests", disable=True if asked.quiet else None) as bar:
        cpu = time.thread_time()
        load = await arrivals.run_load(endpoint.ask, samples, times, asked.max_concurrency, bar.update)
        cpu = time.thread_time() - cpu
    if cpu > BUSY * load.seconds:
        print(
            f"warning: this client was busy {cpu / load.seconds:.0%} of the time; it may be what limits",
            file=sys.stderr,
        )
    summary = summarise(load, asked.percentiles, asked.goals)
    print("\n".join(report.lines(setting, summary)), flush=True)
    return Point(setting.rate, setting, load, samples, summary)


async def _draw(dataset: Dataset, vocabulary: Vocabulary) -> list[Sample]:
    """In a thread: it may ask the server about every prompt."""
    try:
        return await asyncio.to_thread(dataset.draw, vocabulary)
    except (ValueError, OSError) as error:
        raise BenchError(str(error)) from None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


async def _served_model(client: Client, until: float) -> str:
    """The first that the server names, as soon as it names one."""
    while True:
        problem = ""
        try:
            reply = await client.get("/v1/models")
            if reply.status == 200:
                found = msgspec.json.decode(reply.body, type=_Models).data
                if found:
                    return found[0].id
            problem, passing = told(reply.body, f"status {reply.status}"), _may_pass(reply.status)
        except ClientError as error:
            problem, passing = str(error), True
        except msgspec.DecodeError:
            passing = False
        if not passing:
            raise BenchError(f"the server names no model, name one with --model ({problem or 'no list of models'})")
        await _wait(until, problem)


async def _until_ready(endpoint: Endpoint, until: float) -> None:
    """Until a first request has its answer."""
    while (answer := await endpoint.ask(FIRST)).error:
        if not _may_pass(answer.status):
            raise BenchError(f"the first request fails: {answer.error}")
        await _wait(until, answer.error)


async def _warm_up(endpoint: Endpoint, asked: Options, vocabulary: Vocabulary) -> None:
    """Requests that are not counted. Their samples are not among those that are, unless a file has no others."""
    if asked.num_warmups:
        samples = await _draw(asked.dataset.again(len(asked.rates), asked.num_warmups), vocabulary)
        await arrivals.run_load(endpoint.ask, samples, [0.0] * len(samples), asked.max_concurrency)


def _may_pass(status: int) -> bool:
    return status == 0 or status >= 500 or status in _PASSING


async def _wait(until: float, problem: str) -> None:
    if time.monotonic() + _ASK_AGAIN_SECONDS > until:
        raise BenchError(f"the server is not ready: {problem}")
    await asyncio.sleep(_ASK_AGAIN_SECONDS)


def _file_vocabulary(name: str) -> Vocabulary:
    try:
        return FileVocabulary(name)
    except ValueError as error:
        raise BenchError(str(error)) from None


def _server_vocabulary(asked: Options, model: str, closing: ExitStack) -> Vocabulary:
    """The server's own, closed by `closing`; or words."""
    try:
        found = ServerVocabulary(asked.url, asked.headers, model)
    except ValueError as error:
        print(f"note: {error}; prompts are as long in words (--tokenizer names a tokenizer)", file=sys.stderr)
        return WordVocabulary()
    closing.callback(found.close)
    return found


def _setting(asked: Options, label: str | None, model: str, rate: float) -> report.Setting:
    ramp = asked.ramp
    return report.Setting(
        backend=asked.backend,
        model=model,
        tokenizer=asked.tokenizer or model,
        label=label,
        num_prompts=asked.dataset.num_prompts,
        rate=rate,
        burstiness=asked.burstiness,
        max_concurrency=asked.max_concurrency,
        ramp=None if ramp is None else (ramp.strategy, ramp.start, ramp.end),
        goals=asked.goals,
        metrics=asked.metrics,
    )


def _save(point: Point, outputs: Outputs, several: bool) -> None:
    if not outputs.save:
        return
    now = datetime.now().strftime("%Y%m%d-%H%M%S")
    setting, rate = point.setting, f"{point.rate:g}qps"
    if outputs.filename is None:
        limit = "" if setting.max_concurrency is None else f"-concurrency{setting.max_concurrency}"
        model = setting.model.rstrip("/").rpartition("/")[2]
        path = outputs.directory / f"{setting.label or setting.backend}-{rate}{limit}-{model}-{now}.json"
    else:
        path = outputs.directory / outputs.filename
        path = path.with_stem(f"{path.stem}-{rate}") if several else path
    detail = (point.load, point.samples) if outputs.detailed else None
    options.write_json(path, report.record(setting, point.summary, now, outputs.metadata, detail))
    print(f"written: {path}")


def _plot(points: Sequence[Point], path: Path) -> None:
    picture = picture_of(points)
    base = path.with_suffix("") if path.suffix in (".html", ".png") else path
    page, image = (base.with_name(base.name + end) for end in (".html", ".png"))
    options.write(page, plot.page(picture).encode())
    print(f"written: {page}")
    if plot.write_png(picture, image):
        print(f"written: {image}")
    else:
        print("note: no PNG without matplotlib; `pip install matplotlib` brings it", file=sys.stderr)


def picture_of(points: Sequence[Point]) -> plot.Picture:
    """A panel for each latency that is told, with its median and percentiles."""
    first = points[0].setting
    panels: list[plot.Panel] = []
    for name in first.metrics:
        spreads = [point.summary.spreads[name] for point in points]
        curves = [plot.Curve("median", tuple(spread.median for spread in spreads))]
        for i, (p, _) in enumerate(spreads[0].percentiles):
            curves.append(plot.Curve(f"p{p:g}", tuple(spread.percentiles[i][1] for spread in spreads)))
        panels.append(plot.Panel(METRICS[name], tuple(curves)))
    return plot.Picture(
        title=f"Latency against load: {first.label or first.model}",
        told=f"{first.num_prompts} requests at each rate, {first.backend}, model {first.model}",
        names=tuple(f"{point.rate:g}" for point in points),
        loads=tuple(point.summary.request_throughput for point in points),
        panels=tuple(panels),
    )


def _add_target(group: argparse._ArgumentGroup) -> None:  # pyright: ignore[reportPrivateUsage]
    group.add_argument(
        "--backend", choices=tuple(PATHS), default="openai", help="openai and vllm: completions (default: openai)"
    )
    group.add_argument("--base-url", metavar="URL", help="instead of --host and --port")
    group.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1")
    group.add_argument("--port", type=options.positive, default=8000, metavar="N", help="default: 8000")
    group.add_argument(
        "--endpoint", metavar="PATH", help="default: that of the backend, /v1/completions or /v1/chat/completions"
    )
    group.add_argument("--model", metavar="NAME", help="default: the first one that is served")
    group.add_argument("--served-model-name", metavar="NAME", help="what requests say, if not --model")
    group.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="a tokenizer.json, its directory or a Hugging Face id; default: the server's /tokenize",
    )
    group.add_argument("--api-key", metavar="KEY", help=f"default: the variable {' or '.join(KEYS)}")
    group.add_argument("--header", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help="HTTP headers")
    group.add_argument(
        "--ready-check-timeout-sec", type=options.seconds, default=600.0, metavar="N",
        help="how long to wait for a first answer; 0: no such request (default: 600)",
    )  # fmt: skip


def _add_load(group: argparse._ArgumentGroup) -> None:  # pyright: ignore[reportPrivateUsage]
    group.add_argument(
        "--request-rate", type=options.rate, metavar="N", help="requests a second (default: inf, all at once)"
    )
    group.add_argument(
        "--request-rates", type=options.rate, nargs="+", metavar="N", help="several rates, one after another"
    )
    group.add_argument(
        "--burstiness", type=options.rate, default=1.0, metavar="N",
        help="1: a Poisson process; less comes in bursts, more is even (default: 1)",
    )  # fmt: skip
    group.add_argument("--max-concurrency", type=options.positive, metavar="N", help="requests at a time")
    group.add_argument("--ramp-up-strategy", choices=("linear", "exponential"), help="a rate that rises")
    group.add_argument("--ramp-up-start-rps", type=options.rate, metavar="N", help="its beginning")
    group.add_argument("--ramp-up-end-rps", type=options.rate, metavar="N", help="its end")
    group.add_argument(
        "--num-warmups", type=options.count, default=0, metavar="N", help="requests that are not counted, first"
    )
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def _add_sampling(group: argparse._ArgumentGroup) -> None:  # pyright: ignore[reportPrivateUsage]
    group.add_argument("--ignore-eos", action="store_true", help="answers are as long as the data set says")
    for name, kind in _SAMPLING.items():
        default = "; default: 0" if name == "temperature" else ""
        group.add_argument(
            f"--{name.replace('_', '-')}", type=kind, metavar="N", help=f"field of every request{default}"
        )
    group.add_argument(
        "--extra-body", type=options.json_object, default={}, metavar="JSON", help="more fields; they beat all others"
    )


def _add_results(group: argparse._ArgumentGroup) -> None:  # pyright: ignore[reportPrivateUsage]
    group.add_argument(
        "--percentile-metrics", default=",".join(METRICS), metavar="NAMES", help=f"default: {','.join(METRICS)}"
    )
    group.add_argument(
        "--metric-percentiles", default="99", metavar="NUMBERS", help="with commas between (default: 99)"
    )
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="NAME:MS", help=f"what a good answer takes: {', '.join(GOALS)}"
    )
    group.add_argument("--label", metavar="TEXT", help="name of this run in results")
    group.add_argument("--save-result", action="store_true", help="write a JSON file")
    group.add_argument("--save-detailed", action="store_true", help="... with every request in it")
    group.add_argument("--result-dir", default=".", metavar="DIR", help="where to (default: here)")
    group.add_argument("--result-filename", metavar="FILE", help="default: made of label, rate, model and time")
    group.add_argument("--metadata", nargs="+", default=[], metavar="KEY=VALUE", help="more to say in the file")
    group.add_argument(
        "--plot", nargs="?", const="bench-serve", metavar="PATH",
        help="draw latency against load: PATH.html, and PATH.png where matplotlib is installed (default: bench-serve)",
    )  # fmt: skip


def _options(flags: argparse.Namespace) -> Options:
    """What to measure.

    Raises:
        ValueError: what is asked for cannot be; the message names the flag.
    """
    if flags.request_rate is not None and flags.request_rates is not None:
        raise ValueError("give --request-rate or --request-rates, one of them")
    ramp = _ramp(flags)
    rates = tuple(flags.request_rates or (flags.request_rate or math.inf,))
    url = str(flags.base_url or _url(flags.host, flags.port)).rstrip("/").removesuffix("/v1")
    if not _is_address(url):
        raise ValueError(f"--base-url must look like http://127.0.0.1:8000, got {url}")
    path = flags.endpoint or PATHS[flags.backend]
    return Options(
        backend=flags.backend,
        url=url,
        path=path if path.startswith("/") else f"/{path}",
        headers=_headers(flags),
        model=flags.model,
        served_model_name=flags.served_model_name,
        tokenizer=flags.tokenizer,
        dataset=datasets.read_flags(flags),
        rates=rates,
        burstiness=flags.burstiness,
        ramp=ramp,
        max_concurrency=flags.max_concurrency,
        fields=_fields(flags),
        num_warmups=flags.num_warmups,
        patience=flags.ready_check_timeout_sec,
        metrics=_metrics(flags.percentile_metrics),
        percentiles=_percentiles(flags.metric_percentiles),
        goals=_goals(flags.goodput),
        quiet=flags.disable_tqdm,
    )


def _outputs(flags: argparse.Namespace) -> Outputs:
    return Outputs(
        label=flags.label,
        metadata=options.pairs(flags.metadata, "--metadata"),
        save=flags.save_result or flags.save_detailed,
        detailed=flags.save_detailed,
        directory=Path(flags.result_dir),
        filename=flags.result_filename,
        plot=None if flags.plot is None else Path(flags.plot),
    )


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _headers(flags: argparse.Namespace) -> dict[str, str]:
    key = flags.api_key or next((found for name in KEYS if (found := os.environ.get(name))), None)
    found = {"Authorization": f"Bearer {key}"} if key else {}
    found |= options.pairs(flags.header, "--header")
    for name, value in found.items():
        if any(c in name + value for c in "\r\n"):
            raise ValueError(f"--header {name!r} must be one line")
    return found


def _fields(flags: argparse.Namespace) -> dict[str, object]:
    given = {name: value for name in _SAMPLING if (value := getattr(flags, name)) is not None}
    ends = {"ignore_eos": True} if flags.ignore_eos else {}
    return {"temperature": 0.0, **given, **ends, **cast(dict[str, object], flags.extra_body)}


def _ramp(flags: argparse.Namespace) -> arrivals.Ramp | None:
    strategy, start, end = flags.ramp_up_strategy, flags.ramp_up_start_rps, flags.ramp_up_end_rps
    if strategy is None:
        if start is not None or end is not None:
            raise ValueError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
        return None
    if start is None or end is None or math.isinf(start) or math.isinf(end) or start > end:
        raise ValueError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps, the end no lower")
    if flags.request_rate is not None or flags.request_rates is not None:
        raise ValueError("--ramp-up-strategy makes the rate; remove --request-rate")
    return arrivals.Ramp(strategy, start, end)


def _metrics(text: str) -> tuple[str, ...]:
    found = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in found:
        if name not in METRICS:
            raise ValueError(f"--percentile-metrics takes {', '.join(METRICS)}, got {name!r}")
    return found


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(word) for word in text.split(","))
    except ValueError:
        found = (-1.0,)
    if not all(0 <= p <= 100 for p in found):
        raise ValueError(f"--metric-percentiles takes numbers in 0..100 with commas between, got {text!r}")
    return found


def _goals(words: Sequence[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in options.pairs(words, "--goodput", ":").items():
        if name not in GOALS:
            raise ValueError(f"--goodput takes {', '.join(GOALS)}, got {name!r}")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = -1.0
        if not found[name] >= 0:
            raise ValueError(f"--goodput {name} takes milliseconds, got {value!r}")
    return found
