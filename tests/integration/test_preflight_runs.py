"""preflight.py for real, in a copy of the repository: a sound machine without a GPU, and a broken one."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import INHERITED, REPOSITORY, snapshot

FOLDERS = ("scripts", "ds_configs", "fsdp_configs", "data", "experiments")


@pytest.fixture
def checkout(tmp_path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__", "results", "output", "?pu_memory", "*.out", "site")
    for name in FOLDERS:
        shutil.copytree(REPOSITORY / name, tmp_path / "it's a copy" / name, ignore=ignored)
    shutil.copy(REPOSITORY / "requirements.txt", tmp_path / "it's a copy")
    return tmp_path / "it's a copy"


def preflight(checkout: Path, *flags: str, **variables: object) -> tuple[int, dict[str, str], str]:
    """Exit code, the line of each check without its name, and all that was printed."""
    basics = {name: os.environ[name] for name in INHERITED if name in os.environ}
    basics["PATH"] = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    basics |= {"SITE": "laptop", "CUDA_VISIBLE_DEVICES": "", "HF_HOME": checkout.parent / "hf"} | variables
    environment = {name: str(value) for name, value in basics.items()}
    command = [sys.executable, "scripts/preflight.py", *flags]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=600)
    *lines, last = done.stdout.splitlines()
    assert all(re.match(r"(ok|warn|fail|skip) +\S", line) for line in lines), done
    states = [line.split()[0] for line in lines]
    counts = ", ".join(f"{states.count(state)} {state}" for state in ("ok", "warn", "fail", "skip"))
    assert last == f"preflight: {counts}"
    assert done.stderr == ""
    return done.returncode, {line[6:24].strip(): f"{line[:5]}{line[25:]}" for line in lines}, done.stdout


def test_a_laptop_is_ready_and_nothing_is_left(checkout):
    before = snapshot(*(checkout / name for name in FOLDERS))
    code, lines, output = preflight(checkout)
    assert code == 0, output
    assert not [line for line in lines.values() if line.startswith("fail")]
    for name, ranks in {"plain python": 1, "ZeRO-2": 2, "FSDP full_shard": 2}.items():
        trained = re.fullmatch(
            rf"ok +2 steps on {ranks} CPU rank\(s\), loss ([0-9.]+), \d+ s with its start", lines[name]
        )
        assert trained, output
        assert 7 < float(trained[1]) < 9, "an untrained model of 2048 tokens has log(2048), 7.62"
    assert lines["site"].startswith("ok   laptop, python of ")
    assert lines["GPUs"].startswith("skip ")
    after = snapshot(*(checkout / name for name in FOLDERS))
    assert {path: content for path, content in after.items() if "__pycache__" not in path.parts} == before
    assert {path.name for path in checkout.iterdir()} == {*FOLDERS, "requirements.txt"}


def test_all_that_is_broken_is_told_at_once(checkout, tmp_path, monkeypatch):
    config = checkout / "ds_configs" / "zero2.json"
    config.write_text(config.read_text().replace('"stage"', '"stge"', 1))
    (checkout / "experiments/baseline/log/.gitignore").unlink()
    (checkout / "experiments/baseline/log").rmdir()
    sizes = {"model_type": "bloom", "vocab_size": 512, "hidden_size": 8, "n_layer": 1, "n_head": 2}
    (checkout / "local").mkdir()
    (checkout / "local" / "config.json").write_text(json.dumps(sizes))
    broken = {"TORCH_EXTENSIONS_DIR": tmp_path / "extensions", "HF_HOME": tmp_path}
    flags = ("--model_name", "./local", "--model_name", "tiny-bloom", "--dataset", "no_such/set", "--quick")
    code, lines, output = preflight(checkout, *flags, **broken)
    assert code == 3, output
    assert {name for name, line in lines.items() if line.startswith("fail")} == {
        "dataset", "ds_configs", "experiments"}  # fmt: skip
    assert re.search(r"zero2\.json: .*stge", lines["ds_configs"])
    # the first in the order of the files; those that use the config are wrong as well
    assert "baseline.slurm: there is no log/ beside it; create it" in lines["experiments"]
    assert re.search(r"and \d+ more$", lines["experiments"])
    assert lines["dataset"].endswith("python scripts/prefetch.py --dataset no_such/set")


def test_a_training_that_fails_keeps_its_log_and_says_where(checkout):
    (checkout / "fsdp_configs" / "full_shard.json").write_text('{"no_such_key": 1}')
    code, lines, output = preflight(checkout)
    assert code == 3, output
    assert {name for name, line in lines.items() if line.startswith("fail")} == {
        "fsdp_configs", "experiments", "FSDP full_shard"}  # fmt: skip
    failed = re.fullmatch(r"fail +error: .*full_shard\.json: .*no_such_key.*; .*; read (.*)", lines["FSDP full_shard"])
    assert failed, output
    assert "no_such_key" in Path(failed[1]).read_text()
