"""A request's body: read with a limit, checked to be JSON, decoded into one of the protocol's records.

Decides what happens to fields that the record does not have: refused by name, ignored, or logged once.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec
from starlette.requests import ClientDisconnect, Request

from server.errors import ApiError, bad_request
from server.racing import ClientGone
from server.service import Service

MAX_BODY = 32 * 1024 * 1024
"""Bytes."""
MAX_READ = 4 * MAX_BODY
"""Bytes of a body that is refused which are read and dropped."""
MAX_BRACKETS = 250_000
MAX_COMMAS = 2_000_000
"""More lists, objects or values than any request needs; decoding them would hold up everybody else for seconds."""

type Harmless = tuple[object, ...]
"""Values of a field, besides null, that ask for what is done anyway."""

_fields_of = msgspec.json.Decoder(dict[str, msgspec.Raw])


async def read[T: msgspec.Struct](
    request: Request,
    service: Service,
    record: type[T],
    *,
    refused: Mapping[str, Harmless],
    ignored: frozenset[str],
    instead: Mapping[str, str] = MappingProxyType({}),
) -> T:
    """The body as a `record`. `instead`: what to use in place of a refused field.

    Raises:
        ApiError: 400, 413 or 415; the message names the field.
        ClientGone: the client left while sending.
    """
    _check_type(request)
    body = await _bytes(request)
    if body.count(b"[") + body.count(b"{") > MAX_BRACKETS or body.count(b",") > MAX_COMMAS:
        raise bad_request(f"the body holds more than {MAX_BRACKETS} brackets or {MAX_COMMAS} commas")
    try:
        fields = _fields_of.decode(body)
        found = msgspec.json.decode(body, type=record)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"the body is not valid JSON in UTF-8 (no lone surrogates): {error}") from None
    except (RecursionError, ValueError):
        raise bad_request("the body nests too deep, or holds a number that is too long") from None
    unknown = [name for name in fields if name not in record.__struct_encode_fields__ and name not in ignored]
    for name in unknown:
        if name in refused:
            _check_harmless(name, fields[name], refused[name], instead.get(name))
    service.log_unknown([name for name in unknown if name not in refused])
    return found


def _check_type(request: Request) -> None:
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind and kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(
            415, f"the body must be JSON, with the header 'Content-Type: application/json', got {kind[:100]!r}"
        )


async def _bytes(request: Request) -> bytes:
    """The body. One that is too large is read to its end within reason, or its sender would not hear the answer."""
    declared = request.headers.get("content-length", "0")
    size = int(declared[:20]) if declared.isdecimal() else 0
    if size > MAX_READ:
        raise _too_large()
    parts: list[bytes] = []
    large = size > MAX_BODY
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            large = large or size > MAX_BODY
            if size > MAX_READ:
                break
            if large:
                parts.clear()
            else:
                parts.append(part)
    except ClientDisconnect:
        raise ClientGone from None
    if large:
        raise _too_large()
    return b"".join(parts)


def _too_large() -> ApiError:
    message = f"the body is larger than {MAX_BODY} bytes"
    return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})


def _invalid(message: str) -> ApiError:
    """msgspec's message, with the field as `param`."""
    text, _, path = message.partition(" - at `")
    path = path.rstrip("`").removeprefix("$").removeprefix(".")
    param = path.split(".")[0].split("[")[0] or None
    return bad_request(f"{path}: {text}" if path else text, param)


def _check_harmless(name: str, raw: msgspec.Raw, harmless: Harmless, instead: str | None) -> None:
    try:
        value: object = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        value = raw
    if value is None or any(type(value) is type(h) and value == h for h in harmless):
        return
    advice = "is not served yet: leave it out" if instead is None else f"is not served: use {instead} instead"
    raise bad_request(f"{name} {advice}", name, "unsupported_parameter")
