"""The files of a saved model: who may read them after a save, and what they are before they are loaded."""

import os
import shutil
from pathlib import Path

from shared.errors import ENVIRONMENT, WorkshopError


def share_weights(folder: str | Path) -> None:
    """Give the weights that were saved in a folder the mode of its config.json, which follows the umask.

    safetensors 0.8 lets only the owner read its files, whatever the umask is.
    """
    for path in Path(folder).glob("*.safetensors"):
        shutil.copymode(Path(folder) / "config.json", path)


def check_files(folder: str, *patterns: str) -> None:
    """Raise WorkshopError for a file of a model's folder that is unreadable, or only stands for the real file.

    Nothing is checked if there is no such folder.
    """
    check_readable(folder)
    for path in sorted(path for pattern in patterns for path in Path(folder).glob(pattern)):
        check_readable(path)
        with path.open("rb") as file:
            beginning = file.read(100).lstrip().lower()
        if beginning.startswith(b"version https://git-lfs"):
            raise WorkshopError(path, "is a pointer of Git LFS, not the file itself", "run git lfs pull in its folder")
        if beginning.startswith((b"<!doctype html", b"<html")):
            raise WorkshopError(path, "is a web page, not the file itself", "download the file again")


def check_readable(path: str | Path) -> None:
    """Raise WorkshopError (exit code 3) if a file or folder exists, but may not be read by this user.

    The libraries would say that it does not exist.
    """
    try:
        os.close(os.open(path, os.O_RDONLY))
    except OSError as error:
        if isinstance(error, PermissionError):
            way_out = "ask its owner to run chmod -R a+rX on the folder, or to copy it to a folder that you may read"
            raise WorkshopError(path, "may not be read by you", way_out, ENVIRONMENT) from error
