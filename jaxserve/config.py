"""The one configuration: from a YAML file, keyword arguments or flags, checked once, then frozen.

Field names are the flags' names (`max_model_len` is `--max-model-len`) and follow vLLM. A flag beats the YAML
file, the YAML file beats the default. This file must never import jax.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, TypeGuard, cast

import yaml

from jaxserve.types import SamplingParams

Dtype = Literal["auto", "bfloat16", "float16", "float32"]
Policy = Literal["fcfs", "priority"]
OnRecompile = Literal["warn", "error"]
LoadFormat = Literal["auto", "dummy"]
KvCacheDtype = Literal["auto", "fp8", "fp8_e4m3"]
CpuKernels = Literal["auto", "native", "xla"]

DEMO_MODEL = "smollm2-135m-instruct"
QUANTIZATIONS = ("int8",)
"""What weights can be made while they are loaded: the names in `weights/quantization.py`."""


def _option[T](default: T, help: str, **extra: str) -> T:
    """A dataclass field; `extra` is what the command line wants to know of it."""
    return field(default=default, metadata={"help": help, **extra})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What an engine is started with. Sizes in bytes unless named otherwise.

    Raises:
        ValueError: a value is impossible; the message names the field and what would be accepted.
    """

    model: str = _option(DEMO_MODEL, "local directory, .gguf file, Hugging Face id, or the demo model")
    tokenizer: str | None = _option(None, "where the tokenizer is, if not with the model")
    revision: str | None = _option(None, "branch, tag or commit of the Hugging Face repository")
    served_model_name: tuple[str, ...] = _option((), "names that requests may use; the first one is in the answers")
    load_format: LoadFormat = _option(
        "auto", "how the weights come: from the checkpoint (auto), or random and made on the device (dummy), to measure"
    )
    dtype: Dtype = _option(
        "auto", "of weights, activations and, unless kv_cache_dtype says otherwise, KV; auto keeps the checkpoint's"
    )
    max_model_len: int | Literal["auto"] | None = _option(
        None, "longest sequence, prompt and answer; unset: the model's own; auto: what memory allows; 8k is 8192"
    )
    gpu_memory_utilization: float = _option(0.92, "share of the device memory that this engine may use")
    kv_cache_memory_bytes: int | None = _option(None, "size of the KV pool, instead of gpu_memory_utilization")
    kv_cache_dtype: KvCacheDtype = _option(
        "auto", "of keys and values: that of dtype (auto), or 8 bits each (fp8 or fp8_e4m3)"
    )
    block_size: int = _option(16, "tokens in a page of KV")
    max_num_seqs: int | None = _option(None, "sequences in a step; default 64 on a CPU, 256 on a GPU")
    max_num_batched_tokens: int | None = _option(None, "tokens in a step; default 512 on a CPU, 8192 on a GPU")
    cpu_kernels: CpuKernels = _option(
        "auto", "on a CPU: compiled by the machine's C++ compiler, by XLA alone, or auto: the first where there is one"
    )
    token_buckets: tuple[int, ...] = _option(
        (), "step sizes that are compiled, fewer start faster; default: powers of two up to max_num_batched_tokens"
    )
    enable_prefix_caching: bool = _option(True, "keep the KV of full pages for prompts that begin alike")
    enable_chunked_prefill: bool = _option(True, "let a prompt enter over several steps")
    scheduling_policy: Policy = _option("fcfs", "who comes next: first come, or lowest priority value")
    seed: int | None = _option(None, "makes requests without a seed of their own reproducible too")
    tensor_parallel_size: int = _option(1, "devices that share every layer", short="-tp")
    quantization: str | None = _option(
        None, "int8: weights are made int8 while they are loaded, activations a token at a time; or none", short="-q"
    )
    generation_config: str = _option("auto", "default sampling from the model (auto), a directory, or none (vllm)")
    override_generation_config: Mapping[str, object] | None = _option(
        None, 'default sampling as JSON, beats generation_config: {"temperature": 0.5}'
    )
    chat_template: str | None = _option(None, "a Jinja file or the template itself, instead of the model's")
    structured_outputs_config: Mapping[str, object] | None = _option(
        None,
        "JSON: backend (auto or guidance), disable_any_whitespace, disable_additional_properties, enable_in_reasoning",
    )
    max_logprobs: int = _option(20, "most logprobs a request may ask for; -1: the whole vocabulary")
    deterministic: bool = _option(False, "same request, same bits, whatever else is running")
    steps_in_flight: int = _option(2, "steps launched before the oldest result is read")
    on_recompile: OnRecompile = _option("warn", "what to do if XLA compiles after warm-up")
    compilation_cache_dir: str | None = _option(None, "where compiled programs are kept; empty string: nowhere")
    compiler_options: Mapping[str, object] | None = _option(
        None, 'XLA options of the programs as JSON, beside jaxserve\'s own: {"xla_gpu_enable_triton_gemm": true}'
    )
    num_pages: int | None = _option(
        None, "KV pages, instead of sizing the pool by memory", flag="--num-gpu-blocks-override"
    )

    def __post_init__(self) -> None:
        put = functools.partial(object.__setattr__, self)
        put("served_model_name", _names("served_model_name", self.served_model_name))
        if self.seed is not None and not _is_whole(self.seed):
            raise ValueError(f"seed must be an integer, got {self.seed!r}")
        put("token_buckets", _sizes("token_buckets", self.token_buckets))
        put("override_generation_config", _generation_override(self.override_generation_config))
        put("max_model_len", _length("max_model_len", self.max_model_len))
        put("structured_outputs_config", _structured(self.structured_outputs_config))
        put("compiler_options", _compiler_options(self.compiler_options))
        for name in ("kv_cache_memory_bytes", "max_num_batched_tokens"):
            put(name, _size(name, getattr(self, name)))
        _check_types(self)
        if self.quantization in ("none", ""):
            put("quantization", None)
        if self.quantization is not None:
            _one_of("quantization", self.quantization, QUANTIZATIONS)
        _one_of("dtype", self.dtype, ("auto", "bfloat16", "float16", "float32"))
        _one_of("kv_cache_dtype", self.kv_cache_dtype, ("auto", "fp8", "fp8_e4m3"))
        _one_of("load_format", self.load_format, ("auto", "dummy"))
        _one_of("cpu_kernels", self.cpu_kernels, ("auto", "native", "xla"))
        _one_of("scheduling_policy", self.scheduling_policy, ("fcfs", "priority"))
        _one_of("on_recompile", self.on_recompile, ("warn", "error"))
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        if self.block_size not in (8, 16, 32, 64, 128):
            raise ValueError(f"block_size must be 8, 16, 32, 64 or 128, got {self.block_size}")
        least = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "tensor_parallel_size": 1, "steps_in_flight": 1}
        for name, low in {**least, "num_pages": 2, "kv_cache_memory_bytes": 1, "max_logprobs": -1}.items():
            value = getattr(self, name)
            if value is not None and (not _is_whole(value) or value < low):
                raise ValueError(f"{name} must be an integer of at least {low}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What the HTTP server is started with; the engine's half is `EngineConfig`."""

    host: str = _option("0.0.0.0", "address to listen on")
    port: int = _option(8000, "port to listen on")
    api_key: tuple[str, ...] = _option((), "keys that clients must send; also JAXSERVE_API_KEY or VLLM_API_KEY")
    shutdown_timeout: float = _option(25.0, "seconds that running requests get after SIGTERM")
    uds: str | None = _option(None, "path of a Unix socket to listen on, instead of host and port")
    root_path: str = _option("", "path under which a proxy shows this server")
    ssl_keyfile: str | None = _option(None, "private key of the TLS certificate")
    ssl_certfile: str | None = _option(None, "TLS certificate; with it the server speaks https")
    ssl_ca_certs: str | None = _option(None, "certificates of those who may sign clients' certificates")
    ssl_cert_reqs: int = _option(0, "clients' certificates: 0 not asked for, 1 optional, 2 required")
    allowed_origins: tuple[str, ...] = _option((), "web pages' origins that may call from a browser; * is any")
    allowed_methods: tuple[str, ...] = _option(("*",), "methods that those pages may use")
    allowed_headers: tuple[str, ...] = _option(("*",), "headers that those pages may send")
    allow_credentials: bool = _option(False, "those pages may send cookies and the like")
    max_num_queued_reqs: int | None = _option(
        None, "sequences that may wait for a row; a request that would make it more gets 503"
    )
    max_num_queued_tokens: int | None = _option(None, "prompt tokens of the sequences that may wait, likewise")
    enable_request_id_headers: bool = _option(True, "every answer carries X-Request-Id")
    enable_server_load_tracking: bool = _option(False, "GET /load: how many requests are being answered")
    disable_fastapi_docs: bool = _option(False, "no /openapi.json")
    sse_keep_alive_interval: float = _option(0.0, "seconds of silence after which a stream says a comment; 0: never")
    enable_auto_tool_choice: bool = _option(True, "the model may call tools where tool_choice leaves it the choice")
    tool_call_parser: str | None = _option(
        None, "how the model writes tool calls (hermes, llama3_json, ...); unset: what its chat template says"
    )
    reasoning_parser: str | None = _option(
        None, "how the model writes its reasoning (qwen3, ...); unset: what its chat template says; none: not at all"
    )
    chat_template_content_format: str = _option(
        "auto", "content of messages as templates see it: string, openai (a list of parts), or auto"
    )
    default_chat_template_kwargs: Mapping[str, object] | None = _option(
        None, "variables for the chat template, as JSON; those of a request beat them"
    )
    enable_per_request_metrics: bool = _option(False, "answers tell how long they took, in metrics")
    enable_force_include_usage: bool = _option(False, "streams end with their usage, asked for or not")
    enable_prompt_tokens_details: bool = _option(
        True, "usage tells how many prompt tokens were found in the prefix cache; it always does"
    )
    trust_request_chat_template: bool = _option(False, "requests may bring a chat template of their own")
    response_role: str = _option("assistant", "role of the answers")
    metrics_prefix: str = _option("jaxserve", "prefix of metric names; vllm gives vLLM's exact names")
    uvicorn_log_level: str = _option("warning", "critical, error, warning, info or debug")
    disable_log_stats: bool = _option(False, "no line of statistics every ten seconds")
    disable_uvicorn_access_log: bool = _option(False, "no line for each HTTP request, whatever uvicorn_log_level")
    enable_log_requests: bool = _option(False, "a line for each request: its id, lengths of prompts, parameters")
    max_log_len: int | None = _option(None, "characters of the prompt in that line; unset: none of it")

    def __post_init__(self) -> None:
        put = functools.partial(object.__setattr__, self)
        put("api_key", _names("api_key", self.api_key))
        for name in ("allowed_origins", "allowed_methods", "allowed_headers"):
            put(name, _words(name, getattr(self, name)))
        put("tool_call_parser", self.tool_call_parser or None)
        put("reasoning_parser", self.reasoning_parser or None)
        put("default_chat_template_kwargs", _mapping("default_chat_template_kwargs", self.default_chat_template_kwargs))
        _one_of("chat_template_content_format", self.chat_template_content_format, ("auto", "string", "openai"))
        put("max_num_queued_tokens", _size("max_num_queued_tokens", self.max_num_queued_tokens))
        _check_types(self)
        for name, low in {"max_num_queued_reqs": 1, "max_num_queued_tokens": 1, "max_log_len": 0}.items():
            value = getattr(self, name)
            if value is not None and (not _is_whole(value) or value < low):
                raise ValueError(f"{name} must be an integer of at least {low}, got {value!r}")
        if not self.enable_prompt_tokens_details:
            raise ValueError("enable_prompt_tokens_details cannot be off: usage always has prompt_tokens_details")
        if self.ssl_cert_reqs not in (0, 1, 2):
            raise ValueError(f"ssl_cert_reqs must be 0, 1 or 2, got {self.ssl_cert_reqs!r}")
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs or self.ssl_cert_reqs):
            raise ValueError("ssl_keyfile, ssl_ca_certs and ssl_cert_reqs need ssl_certfile")
        if not 0 <= self.sse_keep_alive_interval < math.inf:
            raise ValueError(f"sse_keep_alive_interval must be 0 or more seconds, got {self.sse_keep_alive_interval}")
        if not _is_whole(self.port) or not 0 <= self.port <= 65535:
            raise ValueError(f"port must be in 0..65535, got {self.port!r}")
        if not 0 <= self.shutdown_timeout < math.inf:
            raise ValueError(f"shutdown_timeout must be 0 or more seconds, got {self.shutdown_timeout}")
        _one_of("uvicorn_log_level", self.uvicorn_log_level, ("critical", "error", "warning", "info", "debug"))
        if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", self.metrics_prefix):
            raise ValueError(f"metrics_prefix must be a Prometheus name, got {self.metrics_prefix!r}")


# What vLLM has and this engine does not serve yet: refused by name, so that nobody believes it took effect.
NOT_SERVED: frozenset[str] = frozenset(
    """tokenizer_mode trust_remote_code hf_overrides model_impl skip_tokenizer_init
    logprobs_mode runner convert download_dir safetensors_load_strategy max_parallel_loading_workers
    prefix_caching_hash_algo prefix_match_unit kv_cache_dtype_skip_layers kv_offloading_size
    kv_offloading_backend cpu_offload_gb enforce_eager disable_sliding_window max_num_active_seqs
    long_prefill_token_threshold async_scheduling stream_interval watermark scheduler_reserve_full_isl
    prefill_schedule_interval scheduler_cls cudagraph_capture_sizes
    max_cudagraph_capture_size compilation_config attention_backend attention_config pipeline_parallel_size
    data_parallel_size data_parallel_size_local data_parallel_address data_parallel_rpc_port data_parallel_backend
    enable_expert_parallel enable_eplb prefill_context_parallel_size decode_context_parallel_size
    distributed_executor_backend nnodes node_rank master_addr all2all_backend enable_dbo api_server_count
    quantization_config speculative_config spec_method spec_model spec_tokens enable_lora max_loras max_lora_rank
    max_cpu_loras lora_modules lora_dtype fully_sharded_loras ssl_ciphers enable_ssl_refresh
    middleware tool_parser_plugin tool_strict_level reasoning_parser_plugin
    enable_tokenizer_info_endpoint fingerprint_mode h11_max_incomplete_event_size h11_max_header_count
    disable_access_log_for_endpoints enable_log_outputs enable_log_deltas aggregate_engine_logging
    log_level log_config_file log_error_stack
    otlp_traces_endpoint collect_detailed_traces show_hidden_metrics_for_version kv_cache_metrics
    custom_histogram_buckets cudagraph_metrics enable_mfu_metrics enable_logging_iteration_details jit_monitor_mode
    profiler_config watchdog_config kv_transfer_config kv_events_config
    weight_transfer_config enable_sleep_mode logits_processors additional_config worker_extension_cls
    limit_mm_per_prompt allowed_local_media_path allowed_media_domains enable_prompt_embeds swap_space""".split()
)


SAMPLING_DEFAULTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""What counts of a generation config, and what `SamplingParams` calls it."""


def sampling_defaults(generation: Mapping[str, object]) -> dict[str, object]:
    """A generation config's sampling, under the names of `SamplingParams`."""
    return {name: v for key, name in SAMPLING_DEFAULTS.items() if (v := generation.get(key)) is not None}


def names_of(*classes: type) -> dict[str, dataclasses.Field[object]]:
    """Every option of these configuration classes by its name, `num_gpu_blocks_override` for `num_pages` too."""
    found = {f.name: f for c in classes for f in fields(c)}
    aliases = {f.metadata["flag"].strip("-").replace("-", "_"): f for f in found.values() if "flag" in f.metadata}
    return found | aliases


def check_names(given: list[str], known: dict[str, dataclasses.Field[object]], where: str) -> None:
    """Refuses names that are not options. `where` says what was read: a file's name, or 'LLM(...)'.

    Raises:
        ValueError: a name is vLLM's but not served, or unknown (with the nearest known one).
    """
    for name in given:
        if name in known:
            continue
        if name in NOT_SERVED:
            raise ValueError(f"{where}: {name} is an option of vLLM that jaxserve does not serve yet; remove it")
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(sorted(known))}"
        raise ValueError(f"{where}: unknown option {name!r}{hint}")


def read_yaml(path: str | Path) -> dict[str, object]:
    """The options of a launch file, keys with - or _; `num_gpu_blocks_override` and the like by their field's name.

    Raises:
        ValueError: not a mapping, unreadable, or an unknown key.
    """
    try:
        data: object = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as e:
        raise ValueError(f"cannot read the configuration file {path}: {e}") from None
    if data is None:
        return {}
    if not _is_mapping(data):
        raise ValueError(f"{path}: a configuration file is a mapping of option names to values")
    known = names_of(EngineConfig, ServerConfig)
    options = {k.replace("-", "_"): v for k, v in data.items()}
    check_names(list(options), known, str(path))
    return {known[name].name: value for name, value in options.items()}


def _is_mapping(data: object) -> TypeGuard[dict[str, object]]:
    return isinstance(data, dict) and all(isinstance(k, str) for k in cast(dict[object, object], data))


def split(options: dict[str, object]) -> tuple[EngineConfig, ServerConfig]:
    """Both configurations from one mapping of checked names."""
    server = {f.name for f in fields(ServerConfig)}
    return (
        EngineConfig(**{k: v for k, v in options.items() if k not in server}),  # type: ignore[arg-type]
        ServerConfig(**{k: v for k, v in options.items() if k in server}),  # type: ignore[arg-type]
    )


def cache_dir(config: EngineConfig) -> str | None:
    """Where compiled programs are kept between runs, or None for nowhere."""
    if config.compilation_cache_dir is not None:
        return config.compilation_cache_dir or None
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "jaxserve", "xla")


_KINDS: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "float": (int, float),
    "str": (str,),
    "str | None": (str, type(None)),
}


def _check_types(config: EngineConfig | ServerConfig) -> None:
    """Switches, numbers and names are what they should be: in YAML "no" is a string, which would count as true."""
    for option in fields(config):
        value, kinds = getattr(config, option.name), _KINDS.get(str(option.type))
        if kinds is None or (isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))):
            continue
        wanted = {"bool": "true or false", "float": "a number"}.get(str(option.type), "a string")
        raise ValueError(f"{option.name} must be {wanted}, got {value!r}")


def _names(name: str, value: object) -> tuple[str, ...]:
    listed = list(cast(Iterable[object], value)) if isinstance(value, list | tuple) else [value]
    found = [v for v in listed if v is not None]
    if not all(isinstance(v, str) for v in found):
        raise ValueError(f"{name} must be a string or a list of strings (quote numbers in YAML), got {value!r}")
    return tuple(cast(list[str], found))


def _words(name: str, value: object) -> tuple[str, ...]:
    """Names, where a string may also hold several as a JSON list."""
    found: list[str] = []
    for word in _names(name, value):
        listed: object = word
        if word.startswith("["):
            try:
                listed = json.loads(word)
            except ValueError:
                raise ValueError(f"{name} must be a JSON list of strings, got {word!r}") from None
        found += _names(name, listed)
    return tuple(found)


def _mapping(name: str, value: object) -> Mapping[str, object] | None:
    """An object, or one written as JSON."""
    found = value
    if isinstance(value, str):
        try:
            found = json.loads(value)
        except ValueError:
            raise ValueError(f"{name} must be a JSON object, got {value!r}") from None
    if found is None or _is_mapping(found):
        return found
    raise ValueError(f"{name} must be a JSON object, got {value!r}")


def _generation_override(value: object) -> Mapping[str, object] | None:
    name = "override_generation_config"
    found = _mapping(name, value)
    unknown = [key for key in found or () if key not in SAMPLING_DEFAULTS]
    if unknown:
        raise ValueError(f"{name} takes {', '.join(SAMPLING_DEFAULTS)}; {unknown[0]!r} is not among them")
    try:
        SamplingParams(**sampling_defaults(found or {}))  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return found


def _compiler_options(value: object) -> Mapping[str, object] | None:
    name = "compiler_options"
    found = _mapping(name, value)
    for key, setting in (found or {}).items():
        if not key.startswith("xla_") or not isinstance(setting, str | bool | int | float):
            raise ValueError(f"{name} takes XLA options by name (xla_...), text, numbers or true or false, got {key!r}")
    return found


_STRUCTURED = ("disable_any_whitespace", "disable_additional_properties", "enable_in_reasoning")


def _structured(value: object) -> Mapping[str, object] | None:
    name = "structured_outputs_config"
    found = _mapping(name, value)
    for key, setting in (found or {}).items():
        if key == "backend":
            _one_of(f"{name}.backend", setting, ("auto", "guidance"))
        elif key not in _STRUCTURED:
            raise ValueError(f"{name} has no {key!r}; known: backend, {', '.join(_STRUCTURED)}")
        elif not isinstance(setting, bool):
            raise ValueError(f"{name}.{key} must be true or false, got {setting!r}")
    return found


_UNITS = {
    "": 1,
    "k": 1000,
    "m": 1000**2,
    "g": 1000**3,
    "K": 1024,
    "M": 1024**2,
    "G": 1024**3,
    "Ki": 1024,
    "Mi": 1024**2,
    "Gi": 1024**3,
}


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _size(name: str, value: object) -> int | None:
    """An integer, or a string with a unit: vLLM's 1k = 1000, 1K = 1024."""
    if value is None or _is_whole(value):
        return value
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(Ki|Mi|Gi|[kmgKMG]?)", str(value))
    if not found:
        raise ValueError(f"{name} must be an integer or a number with k, K, m, M, g or G, got {value!r}")
    return int(float(found[1]) * _UNITS[found[2]])


def _sizes(name: str, values: Iterable[object]) -> tuple[int, ...]:
    listed = values if isinstance(values, list | tuple) else [values]
    found = tuple(sorted({_size(name, v) or 0 for v in listed if v is not None}))
    if any(size < 1 for size in found):
        raise ValueError(f"{name} must be integers of at least 1, got {values!r}")
    return found


def _length(name: str, value: object) -> int | Literal["auto"] | None:
    if value in ("auto", -1, "-1"):
        return "auto"
    if isinstance(value, str) and re.fullmatch(r"\d+k", value):
        return int(value[:-1]) * 1024
    size = _size(name, value)
    if size is not None and size < 1:
        raise ValueError(f"{name} must be at least 1, got {value!r}")
    return size


def _one_of(name: str, value: object, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise ValueError(f"{name} must be one of {', '.join(accepted)}, got {value!r}")
