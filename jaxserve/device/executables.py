"""Executables in files, so that a start neither traces nor compiles what a start before it has compiled.

One file a program, named by a hash of all that the executable depends on: another machine, another jax, another line
in a source file that shapes programs is another name, so no file is ever out of date. The files are pickles, and
whoever writes them runs code in this process: a directory that others can write is refused. Knows no model.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import logging
import os
import pickle
import platform
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

log = logging.getLogger(__name__)

Executable = jax.stages.Compiled
Options = Mapping[str, object]
"""XLA's, of these programs only."""

KEPT_BYTES = 2**30
"""All files together; beyond that those go that were not used for the longest time."""

_HEAD = b"jaxserve executable 1\n"
_SUFFIX = ".xla"
_PACKAGES = ("jaxserve", "pallas_kernels")
_ROOMS = ("device", "layers", "models", "native", "sampling", "weights")
"""Those of jaxserve whose code ends up in programs."""
_VARIABLES = ("XLA_", "TF_XLA_", "MOSAIC_", "LIBTPU_", "NVIDIA_TF32_OVERRIDE", "NPROC", "OMP_NUM_THREADS")
_OTHER_VARIABLES = ("XLA_PYTHON_CLIENT_",)
"""Among them, but about memory only."""
_OTHER_SETTINGS = ("cache", "jax_log", "debug_log", "dump", "pprint", "traceback")
"""Parts of the names of jax's settings that change no program."""
_CPU_FACTS = ("model name", "flags", "Features", "CPU implementer", "CPU part")


@dataclass(frozen=True)
class Program:
    """A function of arrays before it is compiled, with everything that it will be compiled for."""

    name: str
    run: Callable[..., object]
    sizes: tuple[object, ...]
    """The first arguments of `run`, fixed when it is traced. What they print as must say all that they are."""
    args: tuple[object, ...]
    """The others: trees of ShapeDtypeStructs with their shardings."""
    donated: tuple[int, ...]
    """Which of `args` the program may overwrite."""
    results: object
    """Shardings."""

    def lower(self) -> jax.stages.Lowered:
        bound = functools.partial(self.run, *self.sizes)
        return jax.jit(bound, donate_argnums=self.donated, out_shardings=self.results).lower(*self.args)

    def description(self) -> str:
        """The same text for the same program.

        Raises:
            ValueError: one of `sizes` prints as its address, or shortened.
        """
        text = repr((self.run.__module__, self.run.__qualname__, self.sizes, self.args, self.donated, self.results))
        if " at 0x" in text or "..." in text:
            raise ValueError(f"program {self.name} cannot be named by what it is made of: {text[:500]}")
        return text


class Store:
    """The directory. For any number of threads and processes: a file appears whole or not at all."""

    def __init__(self, directory: Path, mesh: Mesh) -> None:
        """
        Raises:
            PermissionError: others may write there; says what to do.
            OSError: it cannot be made.
        """
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
        if not stat.S_ISDIR(found.st_mode) or not _is_own(found) or found.st_mode & 0o077:
            raise PermissionError(f"{directory} must be a directory of this user, and private (chmod 700)")
        self.directory = directory
        self._devices = list(mesh.devices.flat)
        self._surroundings = surroundings(mesh)

    def load(self, program: Program, options: Options) -> Executable | None:
        """The executable of a start before, if its file is whole and its own."""
        data = self.read(program, options)
        if data is None:
            return None
        try:
            serialised, in_tree, out_tree = pickle.loads(data)
            return serialize_executable.deserialize_and_load(
                serialised, in_tree, out_tree, self._devices[0].client, self._devices
            )
        except Exception as e:  # what is in a pickle may fail in any way
            log.warning("%s cannot be loaded (%s); compiling it anew", self._file(program, options), _line(e))
            return None

    def save(self, program: Program, options: Options, executable: Executable) -> None:
        """Keeps an executable. It must have been compiled in this process: XLA writes loaded ones incompletely."""
        try:
            body = pickle.dumps(serialize_executable.serialize(executable))
        except Exception as e:  # not every backend and program can
            log.warning("program %s cannot be kept: %s", program.name, _line(e))
            return
        self.write(program, options, body)

    def read(self, program: Program, options: Options, what: str = "") -> bytes | None:
        """What was written of a program, if anything; `what`: something else than its executable."""
        file = self._file(program, options, what)
        try:
            with file.open("rb") as opened:
                if not _is_own(os.fstat(opened.fileno())):
                    raise ValueError("it is another user's")
                data = opened.read()
            body = data[len(_seal(file, b"")) :]
            if data != _seal(file, body) + body:
                raise ValueError("it is damaged, or not what its name says")
            os.utime(file)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as e:
            log.warning("%s is not used (%s); it is made anew", file, _line(e))
            return None
        return body

    def write(self, program: Program, options: Options, body: bytes, what: str = "") -> None:
        """Makes or replaces a file; where that cannot be, the log says why."""
        file = self._file(program, options, what)
        part = file.with_name(f"{file.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            part.write_bytes(_seal(file, body) + body)
            part.replace(file)
            self._drop_oldest()
        except OSError as e:
            log.warning("%s cannot be kept: %s", file, _line(e))
            part.unlink(missing_ok=True)

    def _file(self, program: Program, options: Options, what: str = "") -> Path:
        text = repr((self._surroundings, program.description(), sorted(options.items()), what))
        name = "-".join([*program.name.split(), *what.split(), hashlib.sha256(text.encode()).hexdigest()[:32]])
        return self.directory / f"{name}{_SUFFIX}"

    def _drop_oldest(self) -> None:
        """Also what a start left that was killed while it wrote."""
        kept = 0
        for modified, size, file in sorted(_files(self.directory), reverse=True):
            kept += size
            if kept > KEPT_BYTES:
                log.info("dropping %s, last used at %d: %s is full", file.name, modified, self.directory)
                file.unlink(missing_ok=True)


def open_store(base: str | None, mesh: Mesh) -> Store | None:
    """The store in a directory for compiled programs; None, and a word in the log, where there cannot be one."""
    if not base:
        return None
    try:
        return Store(Path(base) / "executables", mesh)
    except OSError as e:
        log.warning("programs are compiled at every start, none is kept: %s", _line(e))
        return None


def temporary_bytes(program: Program, options: Options, store: Store | None) -> int:
    """What a program needs beside its arguments and results, by the compiler's own count, per device.

    The number is kept too: it is asked for before the programs of the engine are known.
    """
    kept = None if store is None else store.read(program, options, "bytes")
    if kept is not None:
        return int(kept)
    with without_jax_cache() if store is not None else nullcontext():
        found = compile_and_keep(program, options, store).memory_analysis()
    count = 0 if found is None else found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    if store is not None:
        store.write(program, options, str(count).encode(), "bytes")
    return count


def compile_and_keep(program: Program, options: Options, store: Store | None) -> Executable:
    """Compiles a program, and keeps it if there is a store. With one, call it `without_jax_cache`."""
    executable = program.lower().compile(compiler_options=dict(options))
    if store is not None:
        store.save(program, options, executable)
    return executable


@contextmanager
def without_jax_cache() -> Iterator[None]:
    """Meanwhile jax compiles and does not load from its own cache: an executable from there cannot be kept."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()


def surroundings(mesh: Mesh) -> str:
    """All that shapes executables besides the programs: code, versions, devices, settings."""
    first = mesh.devices.flat[0]
    settings = {k: str(v) for k, v in jax.config.values.items() if not any(word in k for word in _OTHER_SETTINGS)}
    variables = {k: v for k, v in os.environ.items() if k.startswith(_VARIABLES) and not k.startswith(_OTHER_VARIABLES)}
    return repr(
        (
            _sources(),
            jax.__version__,
            metadata.version("jaxlib"),
            metadata.version("flax"),
            first.client.platform_version,
            len(first.client.devices()),
            [(d.id, d.device_kind, d.process_index) for d in mesh.devices.flat],
            mesh.devices.shape,
            _processor() if first.platform == "cpu" else _cuda(),
            sorted(settings.items()),
            sorted(variables.items()),
        )
    )


@functools.cache
def _sources() -> str:
    """Of the code that ends up in programs. Once a process, soon after its import: files may change, it does not."""
    specs = [importlib.util.find_spec(name) for name in _PACKAGES]
    jaxserve, kernels = (Path(spec.origin).parent if spec and spec.origin else None for spec in specs)
    rooms = [jaxserve / room for room in _ROOMS] if jaxserve else []
    return digest([*rooms, kernels] if kernels else rooms)


def digest(places: Iterable[Path]) -> str:
    """A hash of the names and the text of all sources in these directories."""
    found = hashlib.sha256()
    for place in places:
        for file in sorted(file for pattern in ("*.py", "*.cc", "*.h") for file in place.rglob(pattern)):
            found.update(f"{place.name}/{file.relative_to(place)}\n".encode())
            found.update(hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()


def _processor() -> object:
    """What XLA generates code for: the instruction set, and as many parts as there are cores to run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = os.cpu_count() if affinity is None else len(affinity(0))
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.processor()]
    facts = {line for line in lines if line.startswith(_CPU_FACTS)} or set(lines)
    return platform.machine(), cores, sorted(facts)


def _cuda() -> object:
    """Versions of the driver and of the libraries that XLA compiles with."""
    driver = Path("/proc/driver/nvidia/version")
    installed = {d.name: d.version for d in metadata.distributions() if d.name.startswith(("jax", "nvidia-"))}
    return driver.read_text() if driver.exists() else "", sorted(installed.items())


def _seal(file: Path, body: bytes) -> bytes:
    """What a file begins with."""
    return _HEAD + hashlib.sha256(file.name.encode() + body).digest()


def _files(directory: Path) -> Iterator[tuple[float, int, Path]]:
    """When each file was used last, its size, its place."""
    for file in directory.iterdir():
        with suppress(FileNotFoundError):  # another process has dropped it
            found = file.stat()
            if stat.S_ISREG(found.st_mode) and _SUFFIX in file.name:
                yield found.st_mtime, found.st_size, file


def _is_own(found: os.stat_result) -> bool:
    return found.st_uid == os.geteuid()


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__
