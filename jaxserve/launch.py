"""From a configuration to an engine that is ready: every program compiled, every byte accounted for.

Weights are read while programs compile. Knows every room's constructor and nothing of how they work.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax._src import xla_bridge  # the public API cannot tell whether the backend has started
from jax.sharding import Mesh

from jaxserve.config import EngineConfig, cache_dir, sampling_defaults
from jaxserve.device import memory
from jaxserve.device import mesh as meshes
from jaxserve.device import programs as programlib
from jaxserve.device.executor import Executor
from jaxserve.device.programs import Buckets, Shapes
from jaxserve.device.rows import BANNED, BANNED_TOKENS, RowShape
from jaxserve.device.step import StepShape, Work
from jaxserve.engine import Bounds, Engine
from jaxserve.grammar.compile import Compiler
from jaxserve.host.scheduler import Limits, Scheduler
from jaxserve.layers.attention import TILE
from jaxserve.models import registry
from jaxserve.models.config import CacheGroup, DecoderConfig, architecture_of
from jaxserve.tokenizer import Tokenizer, read_template
from jaxserve.types import Observer
from jaxserve.weights import load as loading
from jaxserve.weights import placement, source
from jaxserve.weights.checkpoint import Checkpoint

log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
"""Called with what is being done and the share of it that is done, 0..1; from any thread."""

_DTYPES = {"bfloat16": jnp.bfloat16, "float16": jnp.float16, "float32": jnp.float32}
GPU_OPTIONS: dict[str, str | bool] = {"xla_gpu_enable_triton_gemm": False}
"""With Triton's GEMM each layer's weights are copied out of the stack first (docs/design)."""


@dataclass(frozen=True)
class Launched:
    """An engine and what belongs to it."""

    engine: Engine
    executor: Executor
    tokenizer: Tokenizer
    grammars: Compiler
    model: nnx.Module
    """With the engine's own arrays in it: one copy of the weights."""
    config: EngineConfig
    """As given, with what was left open filled in."""
    default_params: Mapping[str, object]
    """Sampling defaults of the model's generation_config."""
    architecture: str


def launch(config: EngineConfig, *, progress: Progress | None = None, observers: Iterable[Observer] = ()) -> Launched:
    """Reads the model, compiles every program, allocates the pool. After this nothing compiles.

    Raises:
        ValueError: the configuration, the checkpoint or the memory does not allow it; the message says what would.
    """
    tell = progress or _silent
    began = time.monotonic()
    observers = tuple(observers)
    own_process = _prepare_process(config)
    tell("opening the model", 0.0)
    if config.chat_template is not None:
        read_template(config.chat_template)
    path = source.resolve(config.model, config.revision)
    checkpoint = source.open_checkpoint(path)
    with ThreadPoolExecutor(2, thread_name_prefix="launch") as pool:
        model = _Model.of(config, checkpoint)
        words_ready = pool.submit(_words, config, path, checkpoint, model.config.vocab)
        config, shapes = _sized(_resolve(config, model), model, own_process)
        loaded = pool.submit(_load, model, checkpoint, tell)
        compiled = programlib.compile_all(shapes, options=_options(model.mesh), progress=_compiling(tell))
        module = loaded.result()
        words = words_ready.result()
    config = dataclasses.replace(config, num_pages=shapes.step.pages[0])
    leaves = jax.tree.leaves(module)
    executor = Executor(shapes, compiled, leaves)
    tell("warming up", 1.0)
    engine = Engine(
        Scheduler(_limits(config, shapes, model)),
        executor,
        words.tokenizer,
        _bounds(config, model, words.eos),
        depth=config.steps_in_flight,
        observers=observers,
    )
    engine.at_close(words.grammars.close)
    executor.rehearse(largest=model.on_gpu)
    _watch_compiles(config, engine, observers)
    log.debug("%s is ready after %.1f s", config.model, time.monotonic() - began)
    return Launched(
        engine=engine,
        executor=executor,
        tokenizer=words.tokenizer,
        grammars=words.grammars,
        model=module,
        config=config,
        default_params=sampling_defaults({**words.recommended, **(config.override_generation_config or {})}),
        architecture=model.config.architecture,
    )


def _silent(stage: str, share: float) -> None:
    pass


@dataclass(frozen=True)
class _Model:
    """A model that is described but not loaded."""

    family: registry.Family
    config: DecoderConfig
    abstract: nnx.Module
    dtype: jnp.dtype
    mesh: Mesh
    groups: tuple[CacheGroup, ...]

    @staticmethod
    def of(config: EngineConfig, checkpoint: Checkpoint) -> _Model:
        described = checkpoint.config
        quantised = described.get("quantization_config")
        if config.quantization is not None or quantised:
            named = config.quantization or quantised
            raise ValueError(f"quantization {named!r} is not served yet; use a checkpoint that is not quantised")
        family = registry.family(architecture_of(described))
        mesh = meshes.make(config.tensor_parallel_size)
        tied = loading.head_is_tied(described, checkpoint)
        decoder = DecoderConfig.from_hf(described, ways=config.tensor_parallel_size, tied=tied)
        dtype = _dtype(config, described)
        abstract = jax.eval_shape(lambda: family.model(decoder, rngs=nnx.Rngs(0), dtype=dtype))
        return _Model(family, decoder, abstract, dtype, mesh, tuple(family.cache_groups(decoder)))

    @property
    def device(self) -> jax.Device:
        return self.mesh.devices.flat[0]

    @property
    def on_gpu(self) -> bool:
        return self.device.platform == "gpu"

    def page_bytes(self, page: int) -> int:
        """Of one page in every cache group, on one device."""
        ways = self.mesh.size
        per = [g.layers * page * 2 * g.kv_heads // ways * g.head_dim for g in self.groups]
        return sum(per) * jnp.dtype(self.dtype).itemsize

    def weight_bytes(self) -> int:
        """On one device."""
        total = 0
        for slot, sharding in zip(
            placement.slots(self.abstract), placement.shardings(self.abstract, self.mesh), strict=True
        ):
            total += int(np.prod(sharding.shard_shape(slot.shape))) * slot.dtype.itemsize
        return total


def _dtype(config: EngineConfig, described: Mapping[str, object]) -> jnp.dtype:
    name = config.dtype
    if name == "auto":
        found = described.get("dtype") or described.get("torch_dtype") or "bfloat16"
        name = str(found).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"the checkpoint's dtype {name} is not one of {', '.join(_DTYPES)}; choose one with --dtype")
    return _DTYPES[name]


def _prepare_process(config: EngineConfig) -> bool:
    """What must be set before JAX's backend starts, and JAX's compilation cache.

    Returns whether the backend starts now, with the memory fraction of this configuration.
    """
    fresh = not xla_bridge.backends_are_initialized()
    if fresh:
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(config.gpu_memory_utilization))
    if jax.default_backend() == "cpu":
        memory.keep_freed_memory()
    if config.compilation_cache_dir is not None or not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", cache_dir(config))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return fresh


def _options(mesh: Mesh) -> dict[str, str | bool] | None:
    return GPU_OPTIONS if mesh.devices.flat[0].platform == "gpu" else None


def _resolve(config: EngineConfig, model: _Model) -> EngineConfig:
    """Fills in what depends on the machine and the model."""
    rows = config.max_num_seqs or (256 if model.on_gpu else 64)
    tokens = _step_tokens(config, rows, 8192 if model.on_gpu else 512)
    own = model.config.max_position
    length = own if config.max_model_len in (None, "auto") else config.max_model_len
    assert isinstance(length, int)
    if length > own:
        raise ValueError(f"max_model_len {length} is longer than the model's {own} positions; lower --max-model-len")
    if not config.enable_chunked_prefill and tokens < length:
        raise ValueError(
            f"without chunked prefill a prompt must fit into one step: --max-num-batched-tokens {tokens} must be at "
            f"least max_model_len {length}"
        )
    length = "auto" if config.max_model_len == "auto" else length
    return dataclasses.replace(config, max_num_seqs=rows, max_num_batched_tokens=tokens, max_model_len=length)


def _step_tokens(config: EngineConfig, rows: int, default: int) -> int:
    """Tokens in a step: one for each row at least, and the largest of the token buckets where they are given."""
    given, buckets = config.max_num_batched_tokens, config.token_buckets
    if buckets:
        if given not in (None, buckets[-1]):
            raise ValueError(
                f"max_num_batched_tokens {given} must be the largest of token_buckets {buckets}; leave it out"
            )
        if buckets[-1] < rows:
            raise ValueError(f"token_buckets must reach max_num_seqs {rows}; lower --max-num-seqs or add {rows}")
        return buckets[-1]
    if given is not None and given < rows:
        raise ValueError(f"max_num_batched_tokens {given} must be at least max_num_seqs {rows}; set --max-num-seqs too")
    return given or max(default, rows)


def _sized(config: EngineConfig, model: _Model, own_process: bool) -> tuple[EngineConfig, Shapes]:
    """All shapes, the pool sized by what the weights, the rows and the largest programs leave free.

    A max_model_len of auto becomes the longest sequence that the pool holds.
    """
    auto = config.max_model_len == "auto"
    if auto:
        config = dataclasses.replace(config, max_model_len=model.config.max_position)
    assert isinstance(config.max_model_len, int)
    tiny = _shapes(config, model, pages=2)
    known = config.kv_cache_memory_bytes or config.num_pages or not model.on_gpu
    needs = memory.Needs(
        weights=model.weight_bytes(),
        state=programlib.state_bytes(tiny),
        temporary=0 if known else programlib.temporary_bytes(tiny, _options(model.mesh)),
        page=model.page_bytes(config.block_size),
        tokens=config.block_size,
        longest=config.max_model_len,
    )
    share = 1.0 if own_process and model.on_gpu else config.gpu_memory_utilization
    wishes = memory.Wishes(config.kv_cache_memory_bytes, config.num_pages, share, model.device)
    if auto:
        longest = memory.longest_that_fits(needs, wishes)
        if longest < 2:
            raise ValueError(
                "no KV pool fits into the memory; raise --kv-cache-memory-bytes or --gpu-memory-utilization"
            )
        config, needs = dataclasses.replace(config, max_model_len=longest), dataclasses.replace(needs, longest=longest)
        tiny = _shapes(config, model, pages=2)
    count = memory.pages(needs, wishes)
    return config, tiny.with_pages((count,) * len(model.groups))


def _shapes(config: EngineConfig, model: _Model, pages: int) -> Shapes:
    rows, tokens, length = config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len
    assert isinstance(length, int) and rows is not None and tokens is not None
    rep, page, c = meshes.replicated(model.mesh), config.block_size, model.config
    leaves = tuple(
        jax.ShapeDtypeStruct(slot.shape, slot.dtype, sharding=sharding)
        for slot, sharding in zip(
            placement.slots(model.abstract), placement.shardings(model.abstract, model.mesh), strict=True
        )
    )
    kv = tuple(
        jax.ShapeDtypeStruct(
            (g.layers * pages, 2, g.kv_heads, page, g.head_dim), model.dtype, sharding=meshes.split_heads(model.mesh)
        )
        for g in model.groups
    )
    top = c.vocab if config.max_logprobs < 0 else min(config.max_logprobs, c.vocab)
    return Shapes(
        step=StepShape(
            model=jax.tree.structure(model.abstract),
            page=page,
            pages=(pages,) * len(kv),
            vocab=c.vocab,
            top=top,
            uniform=config.deterministic,
            mesh=model.mesh,
        ),
        rows=RowShape(rows, length, -(-length // TILE) * TILE // page, c.padded_vocab, len(kv)),
        buckets=_buckets(config, model),
        leaves=leaves,
        kv=kv,
        work=jax.jit(Work.empty, static_argnums=(0, 1, 2, 3), out_shardings=rep).eval_shape(
            tokens, rows, c.embed, model.dtype
        ),
    )


def _buckets(config: EngineConfig, model: _Model) -> Buckets:
    """On a CPU a step of few tokens is hardly faster than one of eight, and from eight on bfloat16 products agree.

    Deterministic: only shapes whose products agree bit for bit in float32 too (docs/design).
    """
    rows, tokens = config.max_num_seqs, config.max_num_batched_tokens
    assert rows is not None and tokens is not None
    least_tokens, least_rows = (1, 1) if model.on_gpu else (8, 4)
    if config.deterministic:
        least_tokens, least_rows = 64, rows
        if len(config.token_buckets) > 1 and config.token_buckets[0] < 64:
            raise ValueError(
                f"deterministic needs token_buckets of 64 or more (or only one), got {config.token_buckets}"
            )
    if config.token_buckets:
        least_rows = rows
    chosen = Buckets.choose(tokens=tokens, rows=rows, least_tokens=least_tokens, least_rows=least_rows)
    return dataclasses.replace(chosen, tokens=config.token_buckets) if config.token_buckets else chosen


def _limits(config: EngineConfig, shapes: Shapes, model: _Model) -> Limits:
    return Limits(
        rows=shapes.rows.rows,
        tokens=shapes.buckets.tokens[-1],
        page=config.block_size,
        pages=shapes.step.pages,
        windows=tuple(g.window for g in model.groups),
        caching=config.enable_prefix_caching,
        chunked=config.enable_chunked_prefill,
    )


def _bounds(config: EngineConfig, model: _Model, eos: tuple[int, ...]) -> Bounds:
    assert isinstance(config.max_model_len, int)
    return Bounds(
        max_model_len=config.max_model_len,
        vocab=model.config.vocab,
        max_logprobs=config.max_logprobs,
        eos=eos,
        priorities=config.scheduling_policy == "priority",
        seed=config.seed,
        max_bad_tokens=BANNED_TOKENS,
        max_banned=BANNED,
        constrain_thinking=bool((config.structured_outputs_config or {}).get("enable_in_reasoning")),
        rope_length=None if model.config.rope.stretch is None else model.config.rope.stretch.length_of,
    )


def _load(model: _Model, checkpoint: Checkpoint, tell: Progress) -> nnx.Module:
    return loading.load(
        model.abstract,
        model.family.tensors(model.config),
        checkpoint,
        mesh=model.mesh,
        progress=lambda done, total: tell("loading weights", done / max(total, 1)),
    )


def _compiling(tell: Progress) -> programlib.Progress:
    return lambda what, done, total: tell(what, done / total)


@dataclass(frozen=True)
class _Words:
    """All that concerns text."""

    tokenizer: Tokenizer
    grammars: Compiler
    eos: tuple[int, ...]
    recommended: Mapping[str, object]
    """The generation config that counts."""


def _words(config: EngineConfig, path: Path, checkpoint: Checkpoint, vocab: int) -> _Words:
    if config.tokenizer is not None:
        path = source.resolve_tokenizer(config.tokenizer, config.revision if config.tokenizer == config.model else None)
    tokenizer = Tokenizer.load(path, chat_template=config.chat_template)
    recommended = generation_config(config, checkpoint)
    eos = end_tokens(recommended, checkpoint, tokenizer.eos_token_id)
    options = config.structured_outputs_config or {}
    grammars = Compiler(
        tokenizer.definition(),
        vocab,
        eos,
        disable_any_whitespace=bool(options.get("disable_any_whitespace")),
        disable_additional_properties=bool(options.get("disable_additional_properties", True)),
    )
    return _Words(tokenizer, grammars, eos, recommended)


def generation_config(config: EngineConfig, checkpoint: Checkpoint) -> Mapping[str, object]:
    """What the model's authors recommend, or what the caller put in its place."""
    if config.generation_config == "vllm":
        return {}
    if config.generation_config == "auto":
        return checkpoint.generation_config
    return source.generation_config(config.generation_config)


def end_tokens(generation: Mapping[str, object], checkpoint: Checkpoint, tokenizer_end: int | None) -> tuple[int, ...]:
    """The chosen generation config's list, else the checkpoint's, else its config's, else the tokenizer's."""
    for told in (generation, checkpoint.generation_config, checkpoint.config):
        found = told.get("eos_token_id")
        if isinstance(found, int):
            return (found,)
        if isinstance(found, list | tuple) and found:
            return tuple(int(token) for token in found)
    return () if tokenizer_end is None else (tokenizer_end,)


class _CompileWatch:
    """Counts XLA's backend compiles of the process from now on."""

    def __init__(self, config: EngineConfig, engine: Engine, observers: tuple[Observer, ...]) -> None:
        self._error = config.on_recompile == "error"
        self._engine, self._observers = engine, observers
        self._lock = threading.Lock()
        self._warned = False

    def __call__(self, event: str, duration_secs: float, **_: object) -> None:
        if event != "/jax/core/compile/backend_compile_duration" or self._engine.closed:
            return
        with self._lock:
            for observer in self._observers:
                observer.on_recompile(duration_secs)
        message = f"XLA compiled a program after warm-up ({duration_secs:.2f} s); nothing in the engine should need one"
        if self._error:
            self._engine.fail(RuntimeError(f"{message} (--on-recompile error)"))
        elif not self._warned:
            self._warned = True
            log.warning("%s; later ones are only counted", message)


def _watch_compiles(config: EngineConfig, engine: Engine, observers: tuple[Observer, ...]) -> None:
    watch = _CompileWatch(config, engine, observers)
    jax.monitoring.register_event_duration_secs_listener(watch)
    engine.at_close(lambda: jax.monitoring.unregister_event_duration_listener(watch))
