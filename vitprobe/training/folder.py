"""The folder of a run: who works in it."""

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

LOCK, OWNER = "lock", "owner.json"
PATIENCE = 1.0  # seconds: who only looks whether a folder is in use has it for a moment


class FolderBusyError(RuntimeError):
    """Another process works in the folder of a run."""


@contextlib.contextmanager
def only_one(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Keeps a folder to this call for the length of a `with`; a process that dies leaves it free.

    Args:
        folder: the folder of a run; made if there is none.
        wait: wait for whoever works there, rather than refuse.

    Raises:
        FolderBusyError: if somebody works there, and says who.
        NotADirectoryError: if it is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file, and a training needs a folder: give another one.")
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK, thread_local=False)
    try:
        lock.acquire(timeout=-1 if wait else PATIENCE)
    except Timeout:
        raise FolderBusyError(
            f"{folder} is in use by {_owner(folder)}: wait until it is done, or give another folder."
        ) from None
    try:
        me = {"host": socket.gethostname(), "process": os.getpid()}
        (folder / OWNER).write_text(json.dumps(me))
        yield
    finally:
        lock.release()


def in_use(folder: Path) -> str:
    """Who works in a folder, in words; empty if nobody does."""
    lock = FileLock(folder / LOCK, thread_local=False)
    if not (folder / LOCK).exists():
        return ""
    try:
        with lock.acquire(timeout=0):
            return ""
    except Timeout:
        return _owner(folder)


def _owner(folder: Path) -> str:
    try:
        owner: dict[str, Any] = json.loads((folder / OWNER).read_text())
    except (OSError, ValueError):
        return "another process"
    return f"process {owner.get('process')} on {owner.get('host')}"
