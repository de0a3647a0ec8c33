"""What every test shares: jax on eight fake CPU devices, chosen before any test file can import jax.

Tests marked gpu run only where JAX_PLATFORMS names cuda.
"""

import os

import pytest

FAKE_DEVICES = 8

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={FAKE_DEVICES}"
    ).strip()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "cuda" in os.environ["JAX_PLATFORMS"]:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU and JAX_PLATFORMS=cuda"))
