"""A real browser, Chromium, installed by apt-get where it is not there; no page reaches another machine."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]
FLAGS += ["--no-first-run", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--enable-logging=stderr"]


def find() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


def program() -> str:
    if not find() and os.geteuid() == 0 and shutil.which("apt-get"):
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        apt = ["apt-get", "-qq", "-o", "Acquire::http::Timeout=20", "-o", "DPkg::Lock::Timeout=300"]
        for words in (["update"], ["install", "-y", "--no-install-recommends", "chromium"]):
            subprocess.run([*apt, *words], env=environment, capture_output=True, check=False, timeout=900)
    return find() or pytest.skip("no Chromium here, and no root on Debian to install it")


def browse(url: str, profile: Path, *options: str) -> tuple[str, str]:
    """What the browser prints about the page once its scripts have run, and its own log with the console in it.

    profile: a folder for its own files.
    """
    command = [program(), *FLAGS, f"--user-data-dir={profile}", "--virtual-time-budget=10000", *options, url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return done.stdout, done.stderr
