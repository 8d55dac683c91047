"""Tests of preflight.py with its real runs, in a correct and a broken copy of the repository, without a GPU."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from helpers import NO_KNOBS, REPOSITORY, make_workplace, snapshot
from workbench import Bench

FOLDERS = ("scripts", "ds_configs", "fsdp_configs", "data", "experiments")
FILES = ("requirements.txt", "constraints.txt", "pyproject.toml")


@pytest.fixture
def checkout(tmp_path) -> Path:
    root = make_workplace(tmp_path / "it's a copy", *FOLDERS, links=())
    for name in FILES:
        shutil.copy(REPOSITORY / name, root)
    return root


def preflight(bench: Bench, checkout: Path, *flags: str, **options: object) -> tuple[dict[str, str], str]:
    """Return the line of each check by its name, and the full output."""
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    here = {"SITE": "laptop", "PATH": path, "HF_HOME": checkout.parent / "hf", "HF_HUB_OFFLINE": "unset"}
    how = {"script": "scripts/preflight.py", "launcher": "python", "cwd": checkout}
    done = bench.run(*flags, **NO_KNOBS | how | here | options)
    *lines, last = done.out.splitlines()
    states = [line.split()[0] for line in lines]
    counts = ", ".join(f"{states.count(state)} {state}" for state in ("ok", "warn", "fail", "skip"))
    assert last == f"preflight: {counts}"
    assert done.err == "", done
    return {line[6:24].strip(): f"{line[:5]}{line[25:]}" for line in lines}, done.out


def test_a_laptop_passes_and_no_file_remains(bench, checkout):
    before = snapshot(*(checkout / name for name in FOLDERS))
    lines, output = preflight(bench, checkout, CONTAINER="env")  # so that most checks run in a second process
    for name in ("one_rank", "ddp", "zero2", "full_shard"):
        trained = re.fullmatch(r"ok +eval loss ([0-9.]+), \d+ s", lines[name])
        assert trained, output
        assert 7 < float(trained[1]) < 7.6, "an untrained model with 2048 tokens has log(2048), which is 7.62"
    assert lines["site"].startswith("ok   laptop, Python ")
    assert lines["experiments"].endswith(" would run")
    assert lines["GPUs"].startswith("skip ")
    after = snapshot(*(checkout / name for name in FOLDERS))
    assert {path: content for path, content in after.items() if "__pycache__" not in path.parts} == before
    assert {path.name for path in checkout.iterdir()} == {*FOLDERS, *FILES}


@pytest.mark.faults
def test_all_problems_are_reported_at_once(bench, checkout, tmp_path):
    """Also, preflight.py keeps the log of a failed training."""
    zero2 = checkout / "ds_configs" / "zero2.json"
    zero2.write_text(zero2.read_text().replace('"stage"', '"stge"', 1))
    (checkout / "requirements.txt").write_text("torch==0.1\n")
    flags = ("--model_name", "no_such/model", "--model_name", "tiny-bloom", "--dataset", "no_such/set")
    lines, output = preflight(bench, checkout, *flags, code=3, NCCL_SOCKET_IFNAME="no_such", HF_HOME=str(tmp_path))
    failed = {name for name, line in lines.items() if line.startswith("fail")}
    assert failed == {"packages", "model", "dataset", "experiments", "zero2"}
    assert lines["NCCL_SOCKET_IFNAME"].startswith("warn no_such is not among ")
    assert lines["model"].endswith("python scripts/prefetch.py --model_name no_such/model")
    assert lines["dataset"].endswith("python scripts/prefetch.py --dataset no_such/set")
    assert re.search(r"deepspeed-multi-node/2_nodes: error: .*zero2\.json: .*stge", lines["experiments"])
    kept = re.fullmatch(r"fail +error: .*zero2\.json: .*stge.*; .*; read (.*)", lines["zero2"])
    assert kept, output
    assert "stge" in Path(kept[1]).read_text()
