"""Read files of other people, and replace files in one step."""

import os
import stat
from pathlib import Path

from shared.errors import ENVIRONMENT, WorkshopError


def check_readable(*paths: str | Path) -> None:
    """Raise WorkshopError (exit code 3) for a file or folder that you may not read. A missing one is not an error.

    Python's searches skip such a folder without an error, as if it were empty.
    """
    for path in paths:
        name = os.path.join(path, ".") if os.path.isdir(path) else path  # the dot needs the right to enter the folder
        try:
            os.close(os.open(name, os.O_RDONLY | os.O_NONBLOCK))  # without O_NONBLOCK, a pipe would wait for its writer
        except PermissionError as error:
            remedy = "ask its owner to run chmod -R a+rX on the folder, and chmod a+x on the folders above it"
            raise WorkshopError(path, "may not be read by you", remedy, ENVIRONMENT) from error
        except OSError:
            pass  # there is no such file


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
