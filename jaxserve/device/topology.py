"""Devices that are described and not there: what is jitted over them compiles, down to machine code, and cannot run.

The process must have been prepared by `chips.prepare`.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from jaxserve.chips import Chip
from jaxserve.device.step import AXIS

_CUDA, _CUDNN = (13, 0, 0), (9, 12, 0)


def mesh(chip: Chip, ways: int) -> Mesh:
    """`ways` of these chips in one machine."""
    jax.devices()  # starts the CPU's client, without which there is nothing to hold constants
    described = topologies.get_topology_desc(
        platform="cuda", topology_name=chip.name, target_config=target(chip), topology=f"1x1x{ways}"
    )
    return Mesh(np.array(described.devices), (AXIS,))


def target(chip: Chip) -> str:
    """The fields of XLA's GpuTargetConfigProto, as text.

    Without a device XLA schedules for four fifths of its memory, and would recompute what it finds too large for that.
    What fits is for `memory.pages` to say, so the memory told to XLA is five fourths of the chip's.
    """
    major, minor = chip.compute_capability
    accelerated = "feature_extension: ACCELERATED_FEATURES" if chip.accelerated else ""
    cuda, cudnn = (".".join(map(str, version)) for version in (_CUDA, _CUDNN))
    return f"""
        platform_name: "CUDA" device_description_str: "{chip.name}"
        dnn_version_info {{ major: {_CUDNN[0]} minor: {_CUDNN[1]} patch: {_CUDNN[2]} }}
        runtime_version {{ major: {_CUDA[0]} minor: {_CUDA[1]} patch: {_CUDA[2]} }}
        gpu_device_info {{
            name: "{chip.name}" device_vendor: "NVIDIA Corporation"
            cuda_compute_capability {{ major: {major} minor: {minor} {accelerated} }}
            core_count: {chip.cores} fpus_per_core: {chip.fpus_per_core} clock_rate_ghz: {chip.clock_ghz}
            threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
            thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
            block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
            registers_per_core_limit: 65536 registers_per_block_limit: 65536
            shared_memory_per_core: {chip.shared_memory_per_core} shared_memory_per_block: 49152
            shared_memory_per_block_optin: {chip.shared_memory_per_block}
            l2_cache_size: {chip.l2} memory_bandwidth: {int(chip.bandwidth)} device_memory_size: {chip.memory * 5 // 4}
            device_address_bits: 64 driver_version: "{cuda}" runtime_version: "{cuda}"
            compile_time_toolkit_version: "{cuda}" dnn_version: "{cudnn}"
        }}
    """
