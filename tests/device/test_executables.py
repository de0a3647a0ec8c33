"""Executables in files: what gives a file another name, what is refused, and starts that compile nothing."""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.device import executables, programs
from jaxserve.device import mesh as meshes
from jaxserve.device.executables import Program, Store, open_store
from jaxserve.launching import size
from jaxserve.weights import source
from tests.device.engines import engine, request, run, start, with_tokenizer
from tests.models.cases import Case

MESH = meshes.make(1)


def shifted(by: int, x: jax.Array) -> jax.Array:
    return jnp.sin(x @ x.T)[1:] + by


def scaled(by: int, x: jax.Array) -> jax.Array:
    return x * by


def array(*shape: int, dtype: object = jnp.float32, ways: int = 1) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=meshes.replicated(meshes.make(ways)))


PROGRAM = Program("shift 3", shifted, (3,), (array(8, 8),), (), meshes.replicated(MESH))
X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "executables", MESH)


@contextmanager
def events() -> Iterator[list[str]]:
    """What jax reports meanwhile."""
    seen: list[str] = []
    timed: Callable[..., None] = lambda event, _, **kw: seen.append(event)  # noqa: E731
    told: Callable[..., None] = lambda event, **kw: seen.append(event)  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(timed)
    jax.monitoring.register_event_listener(told)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(timed)
        jax.monitoring.unregister_event_listener(told)


def compiled(seen: list[str]) -> int:
    return sum("backend_compile" in event or "jaxpr_to_mlir" in event for event in seen)


# What has another name


CHANGES = {
    "function": {"run": scaled},
    "sizes": {"sizes": (4,)},
    "shape": {"args": (array(8, 9),)},
    "dtype": {"args": (array(8, 8, dtype=jnp.bfloat16),)},
    "sharding": {"args": (jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=meshes.split_columns(MESH)),)},
    "donated": {"donated": (0,)},
    "results": {"results": meshes.split_columns(MESH)},
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_program_is_another_file(store: Store, change: str) -> None:
    store.write(PROGRAM, {}, b"kept")
    assert store.read(dataclasses.replace(PROGRAM), {}) == b"kept"
    assert store.read(dataclasses.replace(PROGRAM, **CHANGES[change]), {}) is None  # type: ignore[arg-type]


def test_options_name_the_file_whatever_their_order(store: Store) -> None:
    store.write(PROGRAM, {"xla_a": True, "xla_b": 1}, b"kept")
    assert store.read(PROGRAM, {"xla_b": 1, "xla_a": True}) == b"kept"
    assert store.read(PROGRAM, {"xla_a": True}) is None


def test_flags_settings_and_devices_are_in_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [executables.surroundings(meshes.make(ways)) for ways in (1, 2)]
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"] + " --xla_cpu_enable_fast_math=true")
    found.append(executables.surroundings(MESH))
    monkeypatch.undo()
    with jax.default_matmul_precision("highest"):
        found.append(executables.surroundings(MESH))
    assert len(set(found)) == 4


def test_what_changes_no_program_is_not_in_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    before = executables.surroundings(MESH)
    for name in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "HOME", "PORT"):
        monkeypatch.setenv(name, "0.5")
    with executables.without_jax_cache():
        assert executables.surroundings(MESH) == before


def test_the_code_is_in_the_name(tmp_path: Path) -> None:
    file = tmp_path / "package" / "layers" / "norm.py"
    file.parent.mkdir(parents=True)
    digests: list[str] = []
    for text, note in (("x = 1", "a"), ("x = 1", "b"), ("x = 2", "b")):
        file.write_text(text)
        (file.parent / "notes.md").write_text(note)
        digests.append(executables.digest([tmp_path / "package"]))
    file.rename(file.with_name("other.py"))
    digests.append(executables.digest([tmp_path / "package"]))
    assert digests[0] == digests[1] and len(set(digests)) == 3


def test_what_prints_as_its_address_names_no_file(store: Store) -> None:
    for unclear in (object(), np.zeros(5000)):
        with pytest.raises(ValueError, match="cannot be named"):
            store.read(dataclasses.replace(PROGRAM, sizes=(unclear,)), {})


def descriptions(**options: object) -> dict[str, str]:
    """Of the programs of an engine that is not started."""
    directory = with_tokenizer(Case("llama3").directory)
    given = {"max_num_seqs": 4, "token_buckets": (16, 64), "block_size": 8, "num_pages": 60, **options}
    config = EngineConfig(model=str(directory), dtype=str(given.pop("dtype", "float32")), **given)  # type: ignore[arg-type]
    sized = size(config, source.open_checkpoint(directory), MESH, None)
    return {program.name: program.description() for program in programs.every(sized.shapes)}


def test_options_that_do_not_matter_leave_all_names() -> None:
    other = {"served_model_name": "x", "seed": 3, "on_recompile": "error", "steps_in_flight": 1, "num_pages": 60}
    more = {"enable_prefix_caching": False, "gpu_memory_utilization": 0.5, "scheduling_policy": "priority"}
    assert descriptions() == descriptions(**other, **more)


def test_options_that_matter_change_the_programs_that_they_shape() -> None:
    before = descriptions()
    changed = {
        what: {name for name, text in descriptions(**options).items() if before.get(name) != text}
        for what, options in {
            "dtype": {"dtype": "bfloat16"},
            "pool": {"num_pages": 50},
            "buckets": {"token_buckets": (32, 64)},
        }.items()
    }
    reading = {"forward 16", "forward 64", "sample 4", "sample 4 full", "score"}
    assert changed == {
        "dtype": {*reading, "empty"},
        "pool": {"forward 16", "forward 64", "empty"},
        "buckets": {"forward 32"},
    }


# What is refused


def test_a_kept_program_is_loaded_and_computes_the_same_bits(store: Store) -> None:
    first = executables.compile_and_keep(PROGRAM, {}, store)
    with events() as seen:
        second = Store(store.directory, MESH).load(PROGRAM, {})
    assert second is not None and not compiled(seen)
    assert np.asarray(first(X)).tobytes() == np.asarray(second(X)).tobytes()


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut off": lambda data: data[:-100],
    "a bit": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "empty": lambda data: b"",
    "foreign": lambda data: pickle.dumps("something else"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_told_and_replaced(store: Store, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    executables.compile_and_keep(PROGRAM, {}, store)
    [file] = store.directory.iterdir()
    whole = file.read_bytes()
    file.write_bytes(DAMAGE[damage](whole))
    assert store.load(PROGRAM, {}) is None
    assert f"{file} is not used (it is damaged" in caplog.text
    executables.compile_and_keep(PROGRAM, {}, store)
    assert store.load(PROGRAM, {}) is not None


def test_a_file_under_the_name_of_another_is_not_loaded(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    other = dataclasses.replace(PROGRAM, sizes=(4,))
    store.write(PROGRAM, {}, b"kept")
    [file] = store.directory.iterdir()
    store.write(other, {}, b"other")
    [second] = set(store.directory.iterdir()) - {file}
    file.replace(second)
    assert store.read(other, {}) is None
    assert "not what its name says" in caplog.text


def test_a_whole_file_that_holds_no_executable_is_told(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    store.write(PROGRAM, {}, b"no pickle")
    assert store.load(PROGRAM, {}) is None
    assert "cannot be loaded" in caplog.text


def test_a_directory_that_others_may_use_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "executables"
    assert open_store(str(tmp_path), MESH) is not None and place.stat().st_mode & 0o777 == 0o700
    place.chmod(0o755)
    assert open_store(str(tmp_path), MESH) is None
    place.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert open_store(str(tmp_path), MESH) is None
    monkeypatch.undo()
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    assert open_store(str(tmp_path), MESH) is None
    assert caplog.text.count("must be a directory of this user, and private (chmod 700)") == 3


def test_a_file_of_another_user_is_not_read(
    store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write(PROGRAM, {}, b"kept")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert store.read(PROGRAM, {}) is None
    assert "it is another user's" in caplog.text


def test_a_place_that_cannot_be_written_is_told(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    store.directory.rmdir()
    executables.compile_and_keep(PROGRAM, {}, store)
    assert "cannot be kept" in caplog.text


# Several starts, and many


def test_writers_do_not_disturb_each_other_or_readers(store: Store) -> None:
    bodies = [bytes([i]) * 100_000 for i in range(4)]
    together = threading.Barrier(len(bodies))

    def work(body: bytes) -> list[bytes | None]:
        together.wait()
        found: list[bytes | None] = []
        for _ in range(20):
            store.write(PROGRAM, {}, body)
            found.append(store.read(PROGRAM, {}))
        return found

    with ThreadPoolExecutor(len(bodies)) as pool:
        read = [body for found in pool.map(work, bodies) for body in found]
    assert set(read) <= set(bodies) and len(set(read)) > 1
    assert len(list(store.directory.iterdir())) == 1


def test_what_was_not_used_for_longest_goes(
    store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executables, "KEPT_BYTES", 3500)
    caplog.set_level(logging.INFO, "jaxserve")
    sizes = [dataclasses.replace(PROGRAM, sizes=(i,)) for i in range(4)]
    for i, program in enumerate(sizes[:3]):
        store.write(program, {}, bytes(1000))
        for file in store.directory.iterdir():
            os.utime(file, (i, i)) if file.stat().st_mtime > 10 else None
    assert store.read(sizes[0], {}) is not None
    store.write(sizes[3], {}, bytes(1000))
    assert [store.read(program, {}) is not None for program in sizes] == [True, False, True, True]
    assert "is full" in caplog.text


def test_the_need_for_memory_is_asked_once(store: Store) -> None:
    counts: list[int] = []
    for _ in range(2):
        with events() as seen:
            counts.append(executables.temporary_bytes(PROGRAM, {}, store))
        counts.append(compiled(seen) > 0)
    assert counts[0] > 0 and counts == [counts[0], True, counts[0], False]


def test_jax_own_cache_is_not_asked_for_what_is_kept(tmp_path: Path, store: Store) -> None:
    """What jax loads from it runs, but would be written without some of its functions."""
    hit = "/jax/compilation_cache/cache_hits"
    own = {
        "jax_compilation_cache_dir": str(tmp_path / "xla"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in own}
    for name, value in own.items():
        jax.config.update(name, value)
    try:
        with executables.without_jax_cache():
            pass
        with events() as seen:
            for _ in range(2):
                PROGRAM.lower().compile()
        assert hit in seen
        with events() as seen, executables.without_jax_cache():
            executables.compile_and_keep(PROGRAM, {}, store)
        assert hit not in seen
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
    found = store.load(PROGRAM, {})
    assert found is not None
    np.testing.assert_allclose(found(X), np.sin(X @ X.T)[1:] + 3, rtol=1e-5)


@pytest.mark.parametrize("ways", [1, 2])
def test_a_warm_start_compiles_nothing_and_says_the_same(
    tmp_path: Path, eight_heads: Path, caplog: pytest.LogCaptureFixture, ways: int
) -> None:
    caplog.set_level(logging.INFO, "jaxserve")
    answers: list[object] = []
    for _ in range(2):
        with events() as seen:
            launched = start(
                eight_heads, compilation_cache_dir=str(tmp_path), tensor_parallel_size=ways, on_recompile="error"
            )
        drawn = {"temperature": 1.0, "seed": 7, "top_p": 0.9, "logprobs": 4, "prompt_logprobs": 2}
        asked = [request("a", [5, 6, 7]), request("b", range(1, 40), **drawn)]
        outputs = run(engine(launched), asked)
        answers.append([(o.token_ids, repr(o.logprobs)) for out in outputs.values() for o in out.outputs])
        answers.append(repr([out.prompt_logprobs for out in outputs.values()]))
        launched.engine.close()
    assert answers[:2] == answers[2:]
    assert f"programs: {len(os.listdir(tmp_path / 'executables'))} loaded" in caplog.text
    if ways == 1:
        assert not compiled(seen)
