"""Several streams as one, each item with its stream's number. Knows nothing of what they carry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing


async def merged[T](streams: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """Items as they come. Close it to close all streams; an error of one ends them all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue(maxsize=2 * len(streams))
    tasks = [asyncio.create_task(_pump(i, stream, queue)) for i, stream in enumerate(streams)]
    open_streams = len(tasks)
    try:
        while open_streams:
            item = await queue.get()
            if item is None:
                open_streams -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _pump[T](
    index: int, stream: AsyncGenerator[T], queue: asyncio.Queue[tuple[int, T] | BaseException | None]
) -> None:
    """A full queue holds the stream back."""
    end: BaseException | None = None
    try:
        async with aclosing(stream) as items:
            async for item in items:
                await queue.put((index, item))
    except Exception as error:
        end = error
    await queue.put(end)
