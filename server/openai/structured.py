"""What an answer must look like, as a request says it: `structured_outputs` (vLLM) or `response_format` (OpenAI)."""

from __future__ import annotations

import msgspec

from jaxserve.types import StructuredOutputsParams
from server.errors import bad_request
from server.openai.protocol import ResponseFormat, SamplingFields, StructuredOutputs


def wanted(fields: SamplingFields) -> StructuredOutputsParams | None:
    """None: it may look like anything.

    Raises:
        ApiError: 400, more or less than one shape is asked for, or half of one.
    """
    asked, form = fields.structured_outputs, fields.response_format
    shaped = None if form is None else _of_format(form)
    if asked is None:
        return shaped
    if shaped is not None:
        raise bad_request("structured_outputs and response_format cannot both shape the answer", "response_format")
    return _of_outputs(asked)


def _of_format(form: ResponseFormat) -> StructuredOutputsParams | None:
    match form.type:
        case "text":
            return None
        case "json_object":
            return StructuredOutputsParams(json_object=True)
        case "json_schema":
            if form.json_schema is None or form.json_schema.schema is None:
                raise bad_request("response_format of type json_schema needs json_schema.schema", "response_format")
            return StructuredOutputsParams(json=form.json_schema.schema)
        case "structural_tag":
            return StructuredOutputsParams(structural_tag=msgspec.json.encode(form).decode())


def _of_outputs(asked: StructuredOutputs) -> StructuredOutputsParams:
    given: dict[str, object] = msgspec.structs.asdict(asked)
    if isinstance(asked.structural_tag, dict):
        given["structural_tag"] = msgspec.json.encode(asked.structural_tag).decode()
    try:
        return StructuredOutputsParams(**given)  # type: ignore[arg-type]
    except ValueError as error:
        raise bad_request(str(error), "structured_outputs") from None
