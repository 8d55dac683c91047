"""Secrets for the environment of a run, and a search for them in every file that the run leaves."""

import base64
import hashlib
import zipfile
from pathlib import Path

NAMES = (
    "HF_TOKEN",
    "WANDB_API_KEY",
    "AWS_SECRET_ACCESS_KEY",
    "MY_SERVICE_TOKEN",
    "SOME_KEY",
    "A_SECRET",
    "DB_PASSWORD",
)
# 40 hexadecimal digits, because wandb rejects an API key of any other form
CANARIES = {name: hashlib.sha1(name.encode()).hexdigest() for name in NAMES}


def encodings(secret: str) -> list[bytes]:
    """Return the secret in plain text, and in base64 for each offset of the secret in the encoded text."""
    texts = [secret.encode()]
    for before in range(3):
        encoded = base64.b64encode(b"-" * before + secret.encode() + b"-" * 3)
        texts.append(encoded[4:-8])  # drop the ends, which depend on the text around the secret
    return texts


def contents(path: Path):
    """Return the file's bytes, and for a zip file also its unpacked members. torch.save writes zip files."""
    yield path.read_bytes()
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                yield archive.read(name)


def find_leaks(folder: Path) -> list[str]:
    """List the variable and the file ("HF_TOKEN in log/x.out") for each canary in a file below `folder`."""
    found = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()):
        whole = list(contents(path))
        for name, secret in CANARIES.items():
            if any(encoded in content for encoded in encodings(secret) for content in whole):
                found.append(f"{name} in {path.relative_to(folder)}")
    return found
