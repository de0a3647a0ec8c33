"""What a model's name means, with a hub cache made by hand and a downloader that fails in every known way."""

import subprocess
import sys
from pathlib import Path

import httpx
import huggingface_hub
import pytest
from huggingface_hub import constants, errors
from safetensors.numpy import save_file

from jaxserve.config import DEMO_MODEL
from jaxserve.weights import demo, hub, source
from jaxserve.weights.checkpoint import LoadError
from jaxserve.weights.readers.gguf import GgufCheckpoint
from jaxserve.weights.readers.safetensors import SafetensorsCheckpoint
from tests.weights import gguf_files

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write_directory(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text("{}")
    save_file({}, path / "model.safetensors")
    return path


def test_a_directory_is_itself(tmp_path):
    path = write_directory(tmp_path / "model")
    assert source.resolve(str(path)) == path
    assert isinstance(source.open_checkpoint(path), SafetensorsCheckpoint)


def test_a_gguf_file_is_itself(tmp_path):
    file = gguf_files.write(tmp_path / "m.gguf", "llama", gguf_files.tensors())
    assert source.resolve(str(file)) == file
    assert isinstance(source.open_checkpoint(file), GgufCheckpoint)


def test_a_home_directory_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_directory(tmp_path / "model")
    assert source.resolve("~/model") == tmp_path / "model"


def test_the_demo_has_a_name():
    assert source.resolve(DEMO_MODEL) == demo.find()


@pytest.mark.parametrize("name", ["./nothing", "/nothing/here", "nothing.gguf", "a/b/c", "", "org/ name", "../x"])
def test_what_cannot_be_a_hub_id_is_a_missing_file(name, monkeypatch):
    monkeypatch.setattr(hub, "download", lambda *a: pytest.fail("asked the hub"))
    with pytest.raises(ValueError, match="no such file or directory"):
        source.resolve(name)


def test_other_files_are_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"give the directory that holds config\.json"):
        source.resolve(str(tmp_path / "model.safetensors"))


def test_opening_what_is_not_there(tmp_path):
    with pytest.raises(LoadError, match="does not exist"):
        source.open_checkpoint(tmp_path / "nothing")


@pytest.fixture
def cached(tmp_path, monkeypatch) -> Path:
    """A hub cache with one snapshot of org/model, and no network."""
    repository = tmp_path / "hub" / "models--org--model"
    snapshot = write_directory(repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    (repository / "refs" / "v1").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return snapshot


@pytest.mark.parametrize("revision", [None, "v1", COMMIT])
def test_the_cache_serves_without_a_network(cached, revision):
    assert source.resolve("org/model", revision) == cached
    assert source.resolve_tokenizer("org/model", revision) == cached


def test_the_environment_is_honoured(cached, tmp_path):
    code = "from jaxserve.weights.source import resolve; print(resolve('org/model'))"
    env = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "PATH": "", "HOME": str(tmp_path)}
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=root, capture_output=True, text=True)
    assert done.stdout.strip() == str(cached), done.stderr


@pytest.mark.parametrize(("name", "revision"), [("org/other", None), ("org/model", "v2")])
def test_what_is_not_cached_offline(cached, name, revision):
    with pytest.raises(ValueError, match=f"model {name}.*not in the cache.*HF_HUB_OFFLINE"):
        source.resolve(name, revision)


def response(status: int) -> httpx.Response:
    return httpx.Response(status, request=httpx.Request("GET", "https://huggingface.co/api/models/org/model"))


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (errors.GatedRepoError("gated", response=response(403)), "accept its licence .* set HF_TOKEN"),
        (errors.RepositoryNotFoundError("404", response=response(404)), "check the name, or set HF_TOKEN"),
        (errors.RevisionNotFoundError("404", response=response(404)), "revision 'v9' does not exist in org/model"),
        (errors.HFValidationError("bad"), "neither a file or directory here nor a Hugging Face id"),
        (errors.LocalEntryNotFoundError("nothing\nmore"), r"not in the cache .* \(nothing\)"),
        (errors.OfflineModeIsEnabled("offline"), "unset HF_HUB_OFFLINE"),
        (errors.HfHubHTTPError("503 busy", response=response(503)), "cannot download model .*503 busy"),
        (OSError("No space left on device"), "No space left on device; HF_HUB_CACHE"),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, Exception) else None,
)
def test_failures_say_what_to_do(monkeypatch, error, advice):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ValueError, match=advice) as caught:
        source.resolve("org/model", "v9")
    assert "org/model" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_only_what_is_needed_is_asked_for(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: asked.append((a, k)) or str(tmp_path))
    source.resolve("org/model", "v1")
    source.resolve_tokenizer("org/model")
    (name, whole), (_, small) = asked
    assert name == ("org/model",)
    assert whole["revision"] == "v1"
    assert "*.safetensors" in whole["allow_patterns"]
    assert "*.safetensors" not in small["allow_patterns"]
    assert "tokenizer*" in small["allow_patterns"]


def test_a_local_model_never_imports_the_hub():
    code = (
        "import sys; from jaxserve.weights.source import open_checkpoint, resolve;"
        f"open_checkpoint(resolve({DEMO_MODEL!r}));"
        "print(sorted({'huggingface_hub', 'transformers', 'jax', 'torch'} & sys.modules.keys()))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_sampling_defaults_may_come_from_another_directory(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"top_k": 7}')
    assert source.generation_config(str(tmp_path)) == {"top_k": 7}
    with pytest.raises(LoadError, match=r"generation_config\.json does not exist"):
        source.generation_config(str(tmp_path / "nowhere"))
