"""States of models, which are copied from the ranks and written to folders while these compute for others.

What is saved of a model whose present state is on disk already is that folder's files under other names. At most
`SAVES` copies are in memory: the next one waits until a folder is written. A folder is complete or absent.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from megasync.base.files import fsync, new_folder, remove_tree
from megasync.layout.adapter import OPTIMIZER
from megasync.service import interfaces
from megasync.service.promises import Promises
from megasync.service.saved_files import Files, check_files, read_files

log = logging.getLogger(__name__)

SAVES = 4


class Saves:
    """Writes states into folders of ``run``."""

    def __init__(self, run: Path, trainer: interfaces.Trainer, promises: Promises) -> None:
        self._run = run
        self._trainer = trainer
        self._promises = promises
        self._room = asyncio.Semaphore(SAVES)
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(
        self,
        model: str,
        folder: str,
        optimizer: bool,
        source: tuple[str, Files] | None,
        ended: Callable[[Files | Exception], None],
    ) -> None:
        """Returns once a state is copied. Calls ``ended`` with the files of its folder, or why it was not written.

        They are the recorded files of the folder ``source``, which stays until then; without one, they come from the
        ranks. Raises what the ranks raise.
        """
        await self._room.acquire()
        write: Callable[[Path], Awaitable[Files]]
        try:
            if source is not None:
                write = partial(asyncio.to_thread, partial(_link, self._run / source[0], source[1], optimizer))
            else:
                write = partial(_written, await self._trainer.copy_state(model, optimizer))
        except BaseException:
            self._room.release()
            raise
        task = self._promises.vital(self._finish(self._run / folder, write, ended), f"save {folder}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def finished(self) -> None:
        """Waits until all that was begun has ended. Call it when nothing begins anymore."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _finish(
        self, folder: Path, write: Callable[[Path], Awaitable[Files]], ended: Callable[[Files | Exception], None]
    ) -> None:
        result: Files | Exception
        try:
            await asyncio.to_thread(self._prepare, folder)
            result = await write(folder)
        except Exception as error:  # noqa: BLE001 - a full disk has several: whatever it is, nothing was written
            log.warning("Folder %s was not written: %s", folder, error)
            result = error
        finally:
            self._room.release()
        ended(result)

    def _prepare(self, folder: Path) -> None:
        if not folder.parent.is_dir():
            folder.parent.mkdir(parents=True)
            fsync(folder.parent.parent)
            fsync(self._run)
        # An attempt whose outcome was lost with the ranks may have written it.
        if folder.exists():
            remove_tree(folder)


async def _written(write: interfaces.WriteState, folder: Path) -> Files:
    await write(folder)
    return await asyncio.to_thread(read_files, folder)


def _link(source: Path, files: Files, optimizer: bool, folder: Path) -> Files:
    """Makes a folder of another one's files, which never change, without the optimizer's unless it is asked for.

    Raises CheckpointError, and makes none, if they are not the recorded ones.
    """
    taken = files if optimizer else files.without(OPTIMIZER)
    check_files(source, taken, others=files.described)
    with new_folder(folder) as draft:
        for name in taken.described:
            try:
                (draft / name).hardlink_to(source / name)
            except OSError:
                # Some file systems have no such links.
                shutil.copyfile(source / name, draft / name)
    return taken
