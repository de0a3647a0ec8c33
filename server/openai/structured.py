"""What an answer must look like, as a request says it."""

from __future__ import annotations

from jaxserve.types import StructuredOutputsParams
from server.openai.protocol import SamplingFields


def wanted(fields: SamplingFields) -> StructuredOutputsParams | None:
    return None
