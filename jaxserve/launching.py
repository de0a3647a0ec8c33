"""From a configuration to an engine that is ready: every program compiled, every byte accounted for.

Weights are read while programs compile. Knows every room's constructor and nothing of how they work.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import threading
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

from jaxserve import native
from jaxserve.config import EngineConfig, cache_dir, sampling_defaults
from jaxserve.device import executables, memory
from jaxserve.device import mesh as meshes
from jaxserve.device import programs as programlib
from jaxserve.device.executables import Store
from jaxserve.device.executor import Executor
from jaxserve.device.programs import Buckets, Shapes
from jaxserve.device.rows import BANNED, BANNED_TOKENS, RowShape
from jaxserve.device.step import StepShape, Work
from jaxserve.engine import Bounds, Engine
from jaxserve.grammar.compile import Compiler
from jaxserve.host.scheduler import Limits, Scheduler
from jaxserve.layers.attention import TILE
from jaxserve.layers.stack import Decoder
from jaxserve.models import registry
from jaxserve.models.config import CacheGroup, DecoderConfig, architecture_of
from jaxserve.observe.timeline import Timeline
from jaxserve.tokenizer import Tokenizer, read_template
from jaxserve.types import Observer
from jaxserve.weights import load as loading
from jaxserve.weights import placement, source
from jaxserve.weights.checkpoint import Checkpoint
from jaxserve.weights.native import in_place
from jaxserve.weights.quantization import quantise
from jaxserve.weights.readers.gguf import GgufCheckpoint
from pallas_kernels import paged_attention

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
    tell, timeline = progress or _silent, Timeline()
    observers = tuple(observers)
    own_process = _prepare_process(config)
    tell("opening the model", 0.0)
    with timeline.phase("opening the model"):
        if config.chat_template is not None:
            read_template(config.chat_template)
        path, checkpoint = _open(config)
        model = _Model.of(config, checkpoint)
    with ThreadPoolExecutor(2, thread_name_prefix="launch") as pool:
        words_ready = pool.submit(_words, config, path, checkpoint, model.config.vocab, timeline)
        options = _options(config, model.mesh)
        share = 1.0 if own_process and model.on_gpu else config.gpu_memory_utilization
        store = executables.open_store(cache_dir(config), model.mesh)
        with timeline.phase("sizing the pool"):
            sized = _sized(_resolve(config, model), model, memory.limit_of(model.device), share, options, store)
        config, shapes = sized.config, sized.shapes
        loaded = pool.submit(_load, config, model, checkpoint, tell, timeline)
        if config.load_format == "dummy":
            loaded.result()  # jax's cache keeps the program that makes them, and is off while others compile
        with timeline.phase("programs"):
            compiled = programlib.compile_all(shapes, options=options, store=store, progress=_compiling(tell))
        module = loaded.result()
        tell("warming up", 1.0)
        with timeline.phase("warming up"):
            executor = Executor(shapes, compiled, jax.tree.leaves(module))
            executor.rehearse(largest=model.on_gpu)
        words = words_ready.result()
    config = dataclasses.replace(config, num_pages=shapes.step.pages[0])
    engine = Engine(
        Scheduler(_limits(config, shapes, model)),
        executor,
        words.tokenizer,
        _bounds(config, model, words.eos),
        depth=config.steps_in_flight,
        observers=observers,
    )
    engine.at_close(words.grammars.close)
    _watch_compiles(config, engine, observers)
    log.info("%s", timeline)
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


def _open(config: EngineConfig) -> tuple[Path, Checkpoint]:
    """Where the model is, and what is there. Without its weights only the directory's small files are needed."""
    if config.load_format == "dummy":
        path = source.resolve_tokenizer(config.model, config.revision)
        return path, source.open_description(path)
    path = source.resolve(config.model, config.revision)
    return path, source.open_checkpoint(path)


@dataclass(frozen=True)
class _Model:
    """A model that is described but not loaded."""

    family: registry.Family
    config: DecoderConfig
    abstract: nnx.Module
    dtype: jnp.dtype
    kv_dtype: jnp.dtype
    mesh: Mesh
    groups: tuple[CacheGroup, ...]

    @staticmethod
    def of(config: EngineConfig, checkpoint: Checkpoint, mesh: Mesh | None = None) -> _Model:
        described = checkpoint.config
        family = registry.family(architecture_of(described))
        mesh = mesh or meshes.make(config.tensor_parallel_size)
        tied = loading.head_is_tied(described, checkpoint)
        decoder = DecoderConfig.from_hf(described, ways=config.tensor_parallel_size, tied=tied)
        dtype = _dtype(config, described)
        abstract = jax.eval_shape(functools.partial(_built, family, decoder, dtype, config.quantization))
        kv_dtype = dtype if config.kv_cache_dtype == "auto" else jnp.uint8  # the bits of float8_e4m3fn
        return _Model(family, decoder, abstract, dtype, kv_dtype, mesh, tuple(family.cache_groups(decoder)))

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
        return sum(per) * jnp.dtype(self.kv_dtype).itemsize

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


def _options(config: EngineConfig, mesh: Mesh) -> dict[str, object]:
    """XLA's options for the programs; what the configuration says beats what is usual on this platform.

    Raises:
        ValueError: XLA has no such option, or it takes no such value.
    """
    usual = GPU_OPTIONS if mesh.devices.flat[0].platform == "gpu" else {}
    options = {**usual, **(config.compiler_options or {})}
    if config.compiler_options:
        try:
            jax.jit(lambda: 0).lower().compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as e:
            raise ValueError(f"compiler_options: {e}") from None
    return options


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


@dataclass(frozen=True)
class Sized:
    """How large an engine is, before anything of it exists. Bytes are per device."""

    config: EngineConfig
    """With what was left open filled in."""
    shapes: Shapes
    needs: memory.Needs
    options: dict[str, object]
    """XLA's, of the programs."""


def size(config: EngineConfig, checkpoint: Checkpoint, mesh: Mesh, limit: int | None) -> Sized:
    """The sizes of an engine on the devices of `mesh`, which need not exist; no tensor of the checkpoint is read.

    `limit`: bytes of each device that XLA may use, None for CPUs.

    Raises:
        ValueError: as `launch`.
    """
    model = _Model.of(config, checkpoint, mesh)
    return _sized(_resolve(config, model), model, limit, 1.0, _options(config, mesh))


def _sized(
    config: EngineConfig,
    model: _Model,
    limit: int | None,
    share: float,
    options: dict[str, object],
    store: Store | None = None,
) -> Sized:
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
        temporary=0,
        page=model.page_bytes(config.block_size),
        tokens=config.block_size,
        longest=config.max_model_len,
    )
    wishes = memory.Wishes(config.kv_cache_memory_bytes, config.num_pages, share, limit)
    memory.check(needs, wishes, model.mesh.size)
    if not known:
        needs = dataclasses.replace(needs, temporary=programlib.temporary_bytes(tiny, options, store))
    if auto:
        longest = memory.longest_that_fits(needs, wishes)
        if longest < 2:
            raise ValueError(
                "no KV pool fits into the memory; raise --kv-cache-memory-bytes or --gpu-memory-utilization"
            )
        config, needs = dataclasses.replace(config, max_model_len=longest), dataclasses.replace(needs, longest=longest)
        tiny = _shapes(config, model, pages=2)
    count = memory.pages(needs, wishes)
    return Sized(config, tiny.with_pages((count,) * len(model.groups)), needs, options)


def _kernels(config: EngineConfig, model: _Model) -> native.Kernels | None:
    """The native ones, on a CPU where they can be had."""
    if model.on_gpu or config.cpu_kernels == "xla":
        return None
    c, cache, kernels = model.config, cache_dir(config), None
    try:
        if jnp.dtype(model.dtype) == jnp.float16:
            raise native.NativeError("they take no float16; set dtype to bfloat16 or float32")
        kernels = native.load(c.head_dim, c.heads // c.kv_heads, None if cache is None else Path(cache) / "native")
        if not kernels.attends(model.kv_dtype):
            raise native.NativeError(
                f"their attention takes no KV in {config.kv_cache_dtype}; set kv_cache_dtype to auto"
            )
    except native.NativeError as error:
        if config.cpu_kernels == "native":
            raise ValueError(f"cpu_kernels native: {error}; or set cpu_kernels to auto") from None
        _warn_once(f"without native kernels a step is several times slower: {error}")
    return kernels


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
            (g.layers * pages, 2, g.kv_heads, page, g.head_dim), model.kv_dtype, sharding=meshes.split_heads(model.mesh)
        )
        for g in model.groups
    )
    kernels = _kernels(config, model)
    products = kernels if model.mesh.size == 1 else None
    abstract = model.abstract if products is None else in_place(model.abstract, products)
    top = c.vocab if config.max_logprobs < 0 else min(config.max_logprobs, c.vocab)
    return Shapes(
        step=StepShape(
            model=jax.tree.structure(abstract),
            page=page,
            pages=(pages,) * len(kv),
            vocab=c.vocab,
            top=top,
            uniform=config.deterministic,
            mesh=model.mesh,
            kernels=kernels,
            unit=_attention_unit(model, page),
        ),
        rows=RowShape(rows, length, -(-length // TILE) * TILE // page, c.padded_vocab, len(kv)),
        buckets=_buckets(config, model, products),
        leaves=leaves,
        kv=kv,
        work=jax.jit(Work.empty, static_argnums=(0, 1, 2, 3), out_shardings=rep).eval_shape(
            tokens, rows, c.embed, model.dtype
        ),
    )


def _attention_unit(model: _Model, page: int) -> int | None:
    """Tokens in a unit of the Pallas kernel; None where it does not serve, which is logged on a GPU."""
    c, ways = model.config, model.mesh.size
    reason = paged_attention.supported(
        heads=c.heads // ways,
        kv_heads=c.kv_heads // ways,
        size=c.head_dim,
        page=page,
        dtype=model.dtype,
        kv_dtype=model.kv_dtype,
        device=model.device,
    )
    if reason is None:
        return paged_attention.unit_tokens(c.heads // c.kv_heads, c.head_dim)
    if model.on_gpu:
        _warn_once(f"attention is computed by plain XLA, which is slower than the kernel: {reason}")
    return None


@functools.cache
def _warn_once(message: str) -> None:
    log.warning("%s", message)


def _buckets(config: EngineConfig, model: _Model, products: native.Kernels | None) -> Buckets:
    """On a CPU a step of few tokens is hardly faster than one of eight, and from eight on bfloat16 products agree.

    Native products agree for any number of rows, so that a single row need not be sampled as four.

    Deterministic: only shapes whose products agree bit for bit in float32 too (docs/design).
    """
    rows, tokens = config.max_num_seqs, config.max_num_batched_tokens
    assert rows is not None and tokens is not None
    any_rows = model.on_gpu or (products is not None and products.rows >= tokens)
    least_tokens, least_rows = 1 if model.on_gpu else 8, 1 if any_rows else 4
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


def _built(family: registry.Family, config: DecoderConfig, dtype: jnp.dtype, quantization: str | None) -> Decoder:
    return quantise(family.model(config, rngs=nnx.Rngs(0), dtype=dtype), quantization)


def _load(
    config: EngineConfig, model: _Model, checkpoint: Checkpoint, tell: Progress, timeline: Timeline
) -> nnx.Module:
    with timeline.phase("weights"):
        if config.load_format == "dummy":
            build = functools.partial(_built, model.family, model.config, model.dtype, config.quantization)
            return loading.make(build, model.abstract, mesh=model.mesh)
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


def _words(config: EngineConfig, path: Path, checkpoint: Checkpoint, vocab: int, timeline: Timeline) -> _Words:
    metadata = checkpoint.metadata if isinstance(checkpoint, GgufCheckpoint) else None
    if config.tokenizer is not None:
        path = source.resolve_tokenizer(config.tokenizer, config.revision if config.tokenizer == config.model else None)
        metadata = None
    with timeline.phase("tokenizer"):
        tokenizer = Tokenizer.load(path, chat_template=config.chat_template, metadata=metadata)
    recommended = generation_config(config, checkpoint)
    eos = end_tokens(recommended, checkpoint, tokenizer.eos_token_id)
    options = config.structured_outputs_config or {}
    with timeline.phase("grammars"):
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
