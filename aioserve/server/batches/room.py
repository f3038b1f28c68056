"""How much of the disk files and batches take, how much they may, and what is deleted with time.

What blocks on the disk is for the threads of `Disk`.
"""

import contextlib
import os
from collections import Counter
from pathlib import Path

from aioserve.errors import RequestError
from aioserve.server.batches.directory import DAY, Disk, remove_folder

MIB = 2**20
INCOMING = "incoming\0"  # no name of a key


def usage(disk: Disk) -> Counter[str]:
    """Bytes by owner, those of uploads as `INCOMING`'s. A file counts as a MiB at least."""
    used: Counter[str] = Counter()
    for stored in disk.all_files():
        used[stored.owner] += max(stored.file.bytes, MIB)
    for batch_id in disk.batch_ids():
        folder = disk.folder(batch_id)
        sizes = [_size(folder / name) for name in ("output", "errors")]
        sizes.append(_size(folder / "input", of_its_own=True))
        used[disk.owner_of(batch_id)] += max(sum(sizes), MIB)
    for name in os.listdir(disk.incoming):
        used[INCOMING] += _size(disk.incoming / name)
    return used


def is_full(disk: Disk, used: Counter[str], owner: str, more: int = 0) -> bool:
    """Whether there is more than there may be, in all or of that owner, with `more` bytes."""
    limit = disk.settings.max_batch_gib * 2**30
    share = limit * (disk.settings.max_batch_share if owner else 1)
    return used.total() + more > limit or used[owner] + more > share


async def check_room(disk: Disk, owner: str, more: int, of_these_here: int = 0) -> None:
    """Raises `RequestError` if `more` bytes are too many, in all or for that owner; `of_these_here`
    of those bytes lie in `incoming` already.
    """
    used = await disk.do(usage, disk)
    used[INCOMING] -= of_these_here
    if is_full(disk, used, owner, max(more, MIB)):
        raise RequestError(
            "there is no room for this: delete files that are no longer needed, or wait until they "
            "expire (--max-batch-gib, --max-batch-share)"
        )


def sweep(disk: Disk, now: float) -> None:
    """Delete what is older than it may be, and what uploads and crashes have left behind; `now` is
    in seconds since 1970.
    """
    for stored in disk.all_files():
        if stored.file.expires_at <= now:
            disk.remove_file(stored.file.id)
    old = now - disk.settings.batch_file_days * DAY
    for batch_id in disk.batch_ids():
        stored_batch = disk.find_batch(batch_id)
        if stored_batch is None or not stored_batch.batch.has_ended:
            continue
        if stored_batch.batch.created_at < old:
            remove_folder(disk.folder(batch_id))
        else:  # a crash may have left something
            disk.clear_batch(batch_id)
    names = set(os.listdir(disk.files))
    lost = [disk.files / n for n in names if not n.endswith(".json") and f"{n}.json" not in names]
    for path in (*disk.incoming.iterdir(), *lost):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ctime < now - DAY:  # else it may be on its way
                remove_folder(path) if path.is_dir() else path.unlink()


def _size(path: Path, *, of_its_own: bool = False) -> int:
    """Bytes; 0 if it is not there or, where asked, if it has another name, by which it counts."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return 0
    return 0 if of_its_own and found.st_nlink > 1 else found.st_size
