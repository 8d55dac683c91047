"""Reading files that another program wrote, whatever they hold: only real files, and never a large one as a whole."""

import errno
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

BLOCK = 2**20  # bytes read at a time
LONGEST_LINE = 4096  # bytes of a line that goes on beyond a block; a sample or the Trainer's line is shorter


def open_file(path: Path) -> BinaryIO:
    """The file, for reading. OSError also for a pipe or a device, which can keep a reader waiting for ever."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path.open("rb")


def text_blocks(path: Path) -> Iterator[str]:
    """The text in parts of whole lines, without the last line end of each; what is no UTF-8 becomes U+FFFD. OSError."""
    with open_file(path) as file:
        rest = b""
        while part := file.read(BLOCK):
            lines, end, begun = part.rpartition(b"\n")
            if end:
                yield (rest + lines).decode("utf-8", errors="replace")
                rest = b""
            rest = (rest + begun)[:LONGEST_LINE]
        yield rest.decode("utf-8", errors="replace")
