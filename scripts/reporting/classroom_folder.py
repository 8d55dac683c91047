"""Write the page of a class into a folder, once or every few seconds."""

import time
from pathlib import Path

from reporting.classroom_page import render_class
from reporting.classroom_runs import ClassReader
from reporting.page import GENERATOR
from reporting.render import plural
from reporting.report_folder import CLASS_PAGE
from shared.errors import WorkshopError
from shared.files import replace_file

REFRESH_S = 10


def write_class(folders: list[Path], output: Path, experiments: list[str], numbers: bool, watch: bool) -> str:
    """Write class.html, with `watch` again every few seconds until Ctrl-C. Returns a summary."""
    path = output / CLASS_PAGE
    if path.exists() and GENERATOR not in path.read_text(encoding="utf-8", errors="replace"):
        raise WorkshopError(path, "is not a page of this program", "give another folder with -o")
    reader = ClassReader(folders, experiments)
    participants = reader.read()
    if all(each.problem for each in participants):
        raise WorkshopError(
            participants[0].clone, f"{participants[0].problem}; no folder can be read", "give clones of the workshop"
        )
    try:
        if watch:
            print(f"{path}: rewritten every {REFRESH_S} seconds; Ctrl-C ends this", flush=True)
        while watch:
            write_page(path, render_class(reader, participants, numbers, REFRESH_S))
            time.sleep(REFRESH_S)
            participants = reader.read()
    except KeyboardInterrupt:
        print()
    # The last page does not ask the browser to load it again
    write_page(path, render_class(reader, participants, numbers, None))
    jobs = sum(len(each.runs) for each in participants)
    return f"{plural(len(participants), 'participant')}, {plural(jobs, 'job')}: {path}"


def write_page(path: Path, html: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, html)
    except OSError as error:
        raise WorkshopError(path, f"cannot be written ({error.strerror})", "give another folder with -o") from error
