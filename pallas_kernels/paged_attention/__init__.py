"""Ragged paged attention over one pool of pages: decoding and prompts in one call."""

from pallas_kernels.paged_attention.api import paged_attention, supported, unit_tokens
from pallas_kernels.paged_attention.units import Schedule, schedule

__all__ = ["Schedule", "paged_attention", "schedule", "supported", "unit_tokens"]
