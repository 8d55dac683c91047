"""Reading files of other people. A name may lead to a pipe, to nothing, or to a file that only its owner may read."""

import os
import stat
from pathlib import Path


def read_file(path: Path, last: int | None = None) -> bytes:
    """Return the content of a regular file, or its last bytes. Raises OSError for anything else.

    O_NONBLOCK: otherwise the reader of a pipe without a writer waits forever.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(0, "Not a regular file")
        if last is not None:
            file.seek(max(0, status.st_size - last))
        return file.read()
