"""Reading JSON files with clear errors, and replacing one atomically."""

import json
import os
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from shared.errors import BAD_INPUT, WorkshopError
from shared.files import read_file, replace_file

# Files that are not text: the first bytes, the format, and what to do
NOT_TEXT = {
    b"PK\x03\x04": ("a workbook (.xlsx, .ods) or a zip file", "export the sheet as CSV (UTF-8), or unpack the file"),
    b"\xd0\xcf\x11\xe0": ("an old or encrypted Office file, such as .xls", "export the sheet as CSV (UTF-8)"),
    b"PAR1": (
        "a parquet file",
        "convert it: pandas.read_parquet(...).to_json('questions.jsonl', orient='records', lines=True)",
    ),
    b"%PDF": ("a PDF file", "save its text (UTF-8)"),
    b"\x1f\x8b": ("a gzip file", "unpack it with gunzip"),
    b"BZh": ("a bzip2 file", "unpack it with bunzip2"),
    b"\xfd7zXZ": ("an xz file", "unpack it with unxz"),
    b"\x28\xb5\x2f\xfd": ("a zstd file", "unpack it with unzstd"),
}
Model = TypeVar("Model", bound=BaseModel)


def read_json(path: str | Path, remedy: str = "see ds_configs/ and fsdp_configs/") -> dict:
    """Read a JSON object from a file. Raises WorkshopError (exit code 2) with the position of an error in the JSON.

    remedy: advice for the user if the file is missing or does not hold a JSON object.
    """
    content = parse_json(path, decode(path, read_bytes(path, remedy)), "correct the JSON")
    if not isinstance(content, dict):
        raise WorkshopError(path, "is not a JSON object", remedy)
    return content


def read_bytes(path: str | Path, remedy: str) -> bytes:
    """Read a file; `~` is the home directory. Raises WorkshopError (exit code 2) if it is unreadable."""
    try:
        return Path(os.path.expanduser(path)).read_bytes()
    except OSError as error:
        raise WorkshopError(path, error.strerror or "cannot be read", remedy) from error


def decode(path: str | Path, raw: bytes) -> str:
    """Return the text of a file in UTF-8, or in UTF-16, as PowerShell writes it.

    The first bytes show the encoding. Raises WorkshopError (exit code 2) for a file with another content. If its first
    bytes are those of a known format, the error names this format.
    """
    try:
        return raw.decode(json.detect_encoding(raw))  # Excel's byte order mark is not a part of the text
    except UnicodeDecodeError as error:
        kind, remedy = next(
            (entry for beginning, entry in NOT_TEXT.items() if raw.startswith(beginning)),
            (f"not UTF-8 ({error})", f"convert it to UTF-8, for example with iconv -f latin1 -t utf-8 {path}"),
        )
        raise WorkshopError(path, f"is {kind}", remedy) from error


def parse_json(path: str | Path, text: str, remedy: str) -> object:
    """Parse the content of a JSON file. Raises WorkshopError (exit code 2) with line and column of the error."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: thousands of nested lists
        raise WorkshopError(path, str(error), remedy) from error


def read_checked(path: Path, model: type[Model], kind: str, remedy: str, code: int = BAD_INPUT) -> Model:
    """Read a JSON file into a pydantic model.

    kind: name of the file's format, for the error.

    Raises WorkshopError (exit code `code`) that gives the reason why the file cannot be read, or names the wrong field.
    """
    try:
        return model.model_validate_json(read_file(path))
    except OSError as error:
        raise WorkshopError(path, error.strerror or "cannot be read", remedy, code) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    field = ".".join(map(str, first["loc"])) or "the file"
    raise WorkshopError(path, f"is not a valid {kind} ({field}: {first['msg']})", remedy, code)


def write_json(path: Path, content: dict) -> None:
    """Replace the file in one step. JSON has no NaN or infinity, so such a value becomes null. Raises OSError."""
    finite = json.loads(json.dumps(content), parse_constant=lambda name: None)
    replace_file(path, json.dumps(finite, indent=1, ensure_ascii=False) + "\n")


def flatten_keys(content: dict, prefix: str = "") -> dict:
    """Flatten nested dicts into dotted keys: ``{"a": {"b": 1}}`` becomes ``{"a.b": 1}``."""
    leaves: dict = {}
    for key, value in content.items():
        if isinstance(value, dict):
            leaves |= flatten_keys(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves
