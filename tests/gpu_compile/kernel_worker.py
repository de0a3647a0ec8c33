"""Compiles the kernels' full-size cases for an H200 and writes down what ptxas says, in a process of its own.

`python -m tests.gpu_compile.kernel_worker out.json`
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

from jaxserve import chips

chips.prepare(chips.Device.named("h200"), 1)
os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"

import jax  # noqa: E402 - the process has to be prepared first
from jax.sharding import SingleDeviceSharding  # noqa: E402

from jaxserve.device import topology  # noqa: E402
from pallas_kernels import paged_attention  # noqa: E402
from pallas_kernels.paged_attention.cases import FULL, WIDE, Case  # noqa: E402
from tests.gpu_compile import worker  # noqa: E402

REGISTERS = re.compile(r"Used (\d+) registers")


def compiled(case: Case, device: jax.Device) -> dict[str, object]:
    """Spills, registers of each kernel, and why the kernel would not be chosen on this device."""
    arrays = case.abstract(SingleDeviceSharding(device))
    with worker.said_outside_of_python() as said:
        program = jax.jit(lambda a: paged_attention.paged_attention(**a, **case.options()))
        memory = program.trace(arrays).lower(lowering_platforms=("cuda",)).compile().memory_analysis()
    return {
        "spills": worker.SPILLS.findall(said[0]),
        "registers": [int(n) for n in REGISTERS.findall(said[0])],
        "temporary": memory.temp_size_in_bytes,
        "unserved": paged_attention.supported(
            heads=case.heads,
            kv_heads=case.kv_heads,
            size=case.size,
            page=case.page,
            dtype=arrays["q"].dtype,
            kv_dtype=arrays["kv"].dtype,
            device=device,
        ),
    }


def main(out: Path) -> None:
    jax.config.update("jax_enable_compilation_cache", False)
    device = topology.mesh(chips.chips()["h200"], 1).devices.flat[0]
    out.write_text(json.dumps({name: compiled(case, device) for name, case in (FULL | WIDE).items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
