"""Secrets in the environment of a run, and the search for them in everything that it left."""

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
# In the form of a key of Weights & Biases, which wandb refuses in any other: 40 digits
CANARIES = {name: hashlib.sha1(name.encode()).hexdigest() for name in NAMES}


def forms(secret: str) -> list[bytes]:
    """As it is, and in base64, which depends on where in its text the secret begins."""
    texts = [secret.encode()]
    for before in range(3):
        encoded = base64.b64encode(b"-" * before + secret.encode() + b"-" * 3)
        texts.append(encoded[4:-8])  # what is the same whatever stands around it
    return texts


def contents(path: Path):
    """The file's bytes, and those of each file in it, as torch.save writes zip files."""
    yield path.read_bytes()
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                yield archive.read(name)


def leaks(folder: Path) -> list[str]:
    """Name of the variable and of the file, for each file below `folder` that holds a canary."""
    found = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()):
        whole = list(contents(path))
        for name, secret in CANARIES.items():
            if any(form in content for form in forms(secret) for content in whole):
                found.append(f"{name} in {path.relative_to(folder)}")
    return found
