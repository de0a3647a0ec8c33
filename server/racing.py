"""Work that ends early when nobody waits for it any more, or when the server must stop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from starlette.types import Receive

from server.errors import ApiError


class ClientGone(Exception):
    """The client has closed the connection; there is nobody to answer."""


async def race[T](work: Coroutine[object, object, T], receive: Receive, stopping: asyncio.Future[None]) -> T:
    """The result of `work`, which is cancelled when the client leaves or the server stops.

    The request's body must have been read.

    Raises:
        ClientGone: the client left first.
        ApiError: 503, the server stopped first.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, gone, stopping), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if stopping.done():
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        raise ClientGone
    finally:
        await cancel(task)
        await cancel(gone)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel(task: asyncio.Task[object]) -> None:
    """Cancels and waits, so that what the task held is free afterwards."""
    if not task.done():
        task.cancel()
        await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()
