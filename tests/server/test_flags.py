"""The command line's options: a flag beats the file, the file beats the default, nothing is ignored."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

import pytest

from jaxserve.config import NOT_SERVED, EngineConfig, ServerConfig
from server import flags


def read(*words: str) -> tuple[EngineConfig, ServerConfig]:
    parser = argparse.ArgumentParser(prog="jaxserve serve", allow_abbrev=False)
    flags.add_flags(parser)
    return flags.read_flags(parser, words)


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in flags.KEY_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        read(*words)
    assert end.value.code == 2
    return capsys.readouterr().err.split("error: ", 1)[1]


def test_nothing_given_is_the_default() -> None:
    assert read() == (EngineConfig(), ServerConfig())


@pytest.mark.parametrize(
    "words",
    [
        ("some/model", "--port", "9000"), ("--port", "9000", "some/model"), ("--model", "some/model", "--port=9000"),
        ("some/model", "--model", "some/model", "--port=9000"),
    ],
)  # fmt: skip
def test_the_model_stands_anywhere(words: tuple[str, ...]) -> None:
    engine, server = read(*words)
    assert (engine.model, server.port) == ("some/model", 9000)


def test_every_kind_of_flag() -> None:
    engine, server = read(
        "-tp", "2", "-q", "none", "--max-model-len", "8k", "--max_num_seqs=4", "--kv-cache-memory-bytes", "2G",
        "--gpu-memory-utilization", "0.5", "--no-enable-prefix-caching", "--deterministic", "--dtype", "float32",
        "--served-model-name", "a", "b", "--num-gpu-blocks-override", "50", "--api-key", "k1", "k2", "--api-key", "k3",
        "--max-num-batched-tokens", "4k", "--shutdown-timeout", "3", "--chat-template", "{{ x }}",
        "--max-logprobs", "-1",
    )  # fmt: skip
    assert (engine.tensor_parallel_size, engine.quantization, engine.max_model_len) == (2, None, 8192)
    assert (engine.max_num_seqs, engine.kv_cache_memory_bytes, engine.gpu_memory_utilization) == (4, 2 * 1024**3, 0.5)
    assert (engine.enable_prefix_caching, engine.deterministic, engine.dtype) == (False, True, "float32")
    assert (engine.served_model_name, engine.num_pages, engine.max_num_batched_tokens) == (("a", "b"), 50, 4000)
    assert (server.api_key, server.shutdown_timeout) == (("k1", "k2", "k3"), 3.0)
    assert (engine.chat_template, engine.max_logprobs) == ("{{ x }}", -1)
    assert read("--max-model-len", "auto")[0].max_model_len == "auto"


def test_flags_of_the_front_end() -> None:
    _, server = read(
        "--allowed-origins", '["https://a.example", "https://b.example"]', "--allowed-methods", "GET", "POST",
        "--allow-credentials", "--max-num-queued-reqs", "8", "--max-num-queued-tokens", "4k", "--root-path", "/llm",
        "--ssl-certfile", "c.pem", "--ssl-keyfile", "k.pem", "--ssl-cert-reqs", "2", "--uds", "/tmp/x.sock",
        "--sse-keep-alive-interval", "15", "--no-enable-request-id-headers", "--max-log-len", "100",
    )  # fmt: skip
    assert server.allowed_origins == ("https://a.example", "https://b.example")
    assert (server.allowed_methods, server.allowed_headers) == (("GET", "POST"), ("*",))
    assert (server.max_num_queued_reqs, server.max_num_queued_tokens) == (8, 4000)
    assert (server.ssl_certfile, server.ssl_keyfile, server.ssl_cert_reqs) == ("c.pem", "k.pem", 2)
    assert (server.uds, server.root_path, server.sse_keep_alive_interval) == ("/tmp/x.sock", "/llm", 15.0)
    assert (server.allow_credentials, server.enable_request_id_headers, server.max_log_len) == (True, False, 100)


def test_every_option_has_a_flag() -> None:
    for owner in (EngineConfig, ServerConfig):
        for option in fields(owner):
            value = option.default
            if value is None or isinstance(value, tuple | bool):
                continue
            flag = option.metadata.get("flag") or "--" + option.name.replace("_", "-")
            found = read(flag, str(value))[owner is ServerConfig]
            assert getattr(found, option.name) == value


def test_a_flag_beats_the_file_and_the_file_beats_the_default(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("model: from/file\nmax-model-len: 4k\nport: 9001\napi_key: secret\nenable_prefix_caching: false\n")
    engine, server = read("--config", str(file), "--port", "9002", "--enable-prefix-caching")
    assert (engine.model, engine.max_model_len, engine.enable_prefix_caching) == ("from/file", 4096, True)
    assert (server.port, server.api_key) == (9002, ("secret",))
    assert read("other/model", "--config", str(file))[0].model == "other/model"


def test_keys_come_from_the_environment_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "v")
    assert read()[1].api_key == ("v",)
    monkeypatch.setenv("JAXSERVE_API_KEY", "j")
    assert read()[1].api_key == ("j",)
    assert read("--api-key", "k")[1].api_key == ("k",)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--max-model-length", "8"), "did you mean --max-model-len?"),
        (("--prot=9"), "did you mean --port?"),
        (("--quux"), "unknown flag --quux"),
        (("--kv-offloading-size", "4"), "--kv-offloading-size is a flag of vLLM that jaxserve does not serve yet"),
        (("--enforce_eager",), "--enforce-eager is a flag of vLLM"),
        (("--no-enable-lora",), "--no-enable-lora is a flag of vLLM"),
        (("--compilation-config.mode=3",), "is a flag of vLLM"),
        (("-pp", "2"), "-pp is a flag of vLLM"),
        (("-O3",), "-O3 is a flag of vLLM"),
        (("a", "b"), "unexpected argument 'b'"),
        (("a", "--model", "b"), "two models are named: a and b"),
        (("--port", "99999"), "port must be in 0..65535"),
        (("--port", "http"), "port must be in 0..65535"),
        (("--dtype", "int8"), "invalid choice"),
        (("--max-model-len", "long"), "max_model_len must be an integer"),
        (("--tensor-parallel-size", "0"), "tensor_parallel_size must be an integer of at least 1"),
        (("--gpu-memory-utilization", "much"), "invalid float value"),
        (("--api-key", ""), "an API key must not be empty"),
        (("--allowed-origins", "[x"), "allowed_origins must be a JSON list of strings"),
        (("--allowed-origins", "[1]"), "allowed_origins must be a string or a list of strings"),
        (("--max-num-queued-reqs", "0"), "max_num_queued_reqs must be an integer of at least 1"),
        (("--max-num-queued-tokens", "many"), "max_num_queued_tokens must be an integer"),
        (("--ssl-keyfile", "k.pem"), "need ssl_certfile"),
        (("--ssl-certfile", "c.pem", "--ssl-cert-reqs", "3"), "ssl_cert_reqs must be 0, 1 or 2"),
        (("--sse-keep-alive-interval", "-1"), "sse_keep_alive_interval must be 0 or more seconds"),
        (("--config", "nowhere.yaml"), "cannot read the configuration file nowhere.yaml"),
    ],
)
def test_mistakes_are_told(capsys: pytest.CaptureFixture[str], words: tuple[str, ...] | str, told: str) -> None:
    assert told in refused(capsys, *([words] if isinstance(words, str) else words))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("prot: 1", "did you mean port?"),
        ("enable_lora: true", "enable_lora is an option of vLLM that jaxserve does not serve yet"),
        ("- a", "mapping of option names"),
        ("port: [", "cannot read"),
        ("gpu_memory_utilization: 7", "gpu_memory_utilization"),
    ],
)
def test_mistakes_in_the_file_are_told(capsys, tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    assert told in refused(capsys, "--config", str(file))


def test_every_refused_flag_is_refused_by_its_name(capsys) -> None:
    for name in sorted(NOT_SERVED):
        flag = "--" + name.replace("_", "-")
        assert f"{flag} is a flag of vLLM" in refused(capsys, flag)


def test_an_override_of_the_generation_config_is_json_with_known_keys(capsys) -> None:
    given = '{"temperature": 0.5, "max_new_tokens": 9}'
    assert read("--override-generation-config", given)[0].override_generation_config == {
        "temperature": 0.5,
        "max_new_tokens": 9,
    }
    wrong = {
        '{"eos_token_id": 3}': "'eos_token_id' is not among them",
        '{"temperature": 3}': "temperature must be in [0, 2]",
        '{"max_new_tokens": "many"}': "max_tokens must be an integer",
        "[1]": "must be a JSON object",
        "{": "must be a JSON object",
    }
    for text, message in wrong.items():
        found = refused(capsys, "--override-generation-config", text)
        assert found.startswith("override_generation_config") and message in found


def test_details_of_prompt_tokens_are_always_told(capsys) -> None:
    assert read("--enable-prompt-tokens-details") == read()
    assert "enable_prompt_tokens_details cannot be off" in refused(capsys, "--no-enable-prompt-tokens-details")
