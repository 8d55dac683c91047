"""Fixtures that run scripts and shell commands as processes, without a training run or with one that ends at once.

Other fixtures build the web site and control a browser.
"""

import functools
import http.server
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from browser import Page

# pytest finds these fixtures by their names in this module
from fixtures import clean_machine, refusal, sample  # noqa: F401
from helpers import REPOSITORY, Finished, make_workplace
from shell import shell_environment, start_stub


@pytest.fixture
def command(tmp_path) -> Callable[..., Finished]:
    """Run a script as a separate process in the empty directory `work`."""

    def run(script: str, *arguments: object, **variables: str) -> Finished:
        home = tmp_path / "home"
        kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "LANG") if name in os.environ}
        environment = kept | {"HOME": str(home), "HF_HOME": str(home / "hf"), "CUDA_VISIBLE_DEVICES": ""} | variables
        words = [sys.executable, str(REPOSITORY / "scripts" / script), *map(str, arguments)]
        folder = tmp_path / "work"
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
        return Finished(" ".join(words), folder, "", done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def workshop(tmp_path) -> Path:
    """A copy of the code under a path that breaks a script with unquoted variables. `stub` adds experiments/mine/x."""
    folders = ("scripts", "ds_configs", "fsdp_configs", "data", "experiments")
    root = make_workplace(tmp_path / 'it\'s $HOME; a "shop"', *folders, links=())
    shutil.copy(REPOSITORY / "pyproject.toml", root)
    return root


@pytest.fixture(scope="session")
def contained(tmp_path_factory) -> dict[str, str]:
    """Variables of a job whose container is another PATH. Outside, python3 has only requirements-host.txt."""
    folder = tmp_path_factory.mktemp("host")
    venv.create(folder)
    (folder / "bin/python").unlink()
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin/python3", "install", "--quiet"]
    done = subprocess.run([*pip, "-r", REPOSITORY / "requirements-host.txt"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip installs nothing here: {done.stderr}")
    path = shell_environment()["PATH"].split(":")
    words = shlex.join(["env", f"PATH={':'.join(path)}"])
    return {"CONTAINER": words, "PATH": ":".join([path[0], f"{folder}/bin", *path[2:]])}


@pytest.fixture
def stub(workshop, tmp_path) -> Callable[..., tuple[subprocess.CompletedProcess, Path]]:
    """Run an experiment whose training is `code`, without Slurm, and return the finished process and the folder.

    Programs in tmp_path/bin come first on its PATH.
    """
    path = f"{tmp_path}/bin:{shell_environment()['PATH']}"

    def run(code: str, *arguments: str, **options: object):
        folder = workshop / "experiments/mine/x"
        started = start_stub(folder, code, *arguments, **{"PATH": path} | options)
        try:
            out, error = started.communicate(timeout=120)
        finally:
            if started.poll() is None:
                os.killpg(started.pid, signal.SIGKILL)
        return subprocess.CompletedProcess(code, started.returncode, out, error), folder

    return run


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args) -> None:
        pass


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """The site, built by `make docs` in a temporary folder so that the repository stays unchanged."""
    folder = tmp_path_factory.mktemp("site")
    # With --old-file, make uses the packages that are already installed
    command = ["make", "--old-file=.venv/installed-docs", "docs", f"SITE_FOLDER={folder}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="session")
def address(site) -> Iterator[str]:
    """Address of a local server for the site."""
    handler = functools.partial(Quiet, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Iterator[Page]:
    """A page of a real browser."""
    page = Page(tmp_path_factory.mktemp("browser"))
    yield page
    page.close()
