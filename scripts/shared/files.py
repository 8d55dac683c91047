"""Read files of other people, and replace files in one step."""

import os
import stat
from pathlib import Path


def read_file(path: Path, last: int | None = None) -> bytes:
    """Return the content of a regular file, or its last bytes. Raises OSError for anything else.

    A name may lead to a pipe, to nothing, or to a file that only its owner may read.
    O_NONBLOCK: otherwise the reader of a pipe without a writer waits forever.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(0, "Not a regular file")
        if last is not None:
            file.seek(max(0, status.st_size - last))
        return file.read()


def replace_file(path: Path, text: str) -> None:
    """Replace the file in one step, so that no reader sees a part of it. Raises OSError if it cannot be written."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", errors="replace")
        temporary.replace(path)
    except OSError:  # remove the partial file that a full disk leaves
        temporary.unlink(missing_ok=True)
        raise
