"""Tests of `make demo`, which runs four experiments and prints a table that compares them."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from helpers import NO_KNOBS, REPOSITORY, Finished, make_workplace
from workbench import Bench

SHORT = {"TRAIN_SIZE": "96", "NUM_EPOCHS": "1", "EVAL_SIZE": "8"}  # 6 steps, of which three are warm-up


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A separate copy of the repository, whose results no other test writes or reads."""
    links = ("data", "ds_configs", "fsdp_configs", "pyproject.toml")
    root = make_workplace(tmp_path_factory.mktemp("demo"), "experiments", "scripts", links=links)
    (root / ".venv").symlink_to(sys.prefix)
    return root


def demo(bench: Bench, place, **options: object) -> Finished:
    return bench.run(script="scripts/demo.py", launcher="python", cwd=place, **NO_KNOBS | SHORT | options)


@pytest.mark.promise("make demo: equal losses, what each rank held, 8 memorised questions")
def test_four_methods_have_equal_losses_and_show_memory_per_rank(bench, place):
    """The demo must hide the stub for one GPU (tests/gpu_stub), because its ranks would need two GPUs."""
    one_gpu = {"STUB_GPU": "one", "PYTHONPATH": str(REPOSITORY / "tests/gpu_stub")}
    done = demo(bench, place, CUDA_VISIBLE_DEVICES="0", **one_gpu)
    assert done.err == "", done
    records = [json.loads(path.read_text()) for path in place.glob("experiments/demo/*/results/demo-*.json")]
    assert len(records) == 4
    losses = [record["train"]["loss_mean"] for record in records]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-4)
    assert f"All train losses are {losses[0]:.4f}" in done.out
    rows = {
        name.strip(): [cell.strip() for cell in cells]
        for name, *cells in (line.strip("|").split("|") for line in done.out.splitlines() if line.startswith("| "))
    }
    whole = 4 * records[0]["parameters"] / 2**20
    held = {
        "Parameters": (1, 1, 1 / 2, 1 / 2),
        "Gradients": (1, 1, 1 / 2, 1),
        "Optimizer state": (2, 2, 3 / 2, 1),
    }
    for part, shares in held.items():
        for row in (f"{part} (MiB)", f"{part}, estimated (MiB)"):
            assert list(map(float, rows[row])) == pytest.approx([whole * share for share in shares], rel=0.01), row
    assert all(cell for cells in rows.values() for cell in cells), "no cell may be empty"
    assert "a rank of FSDP holds 50% of the parameters, 100% of the gradients, 50% of the optimizer state" in done.out
    memorised = re.search(
        r"question: +\S.*\n  answer before: .*\n  answer after: +(\S.*)\n.* memorised \d of", done.out
    )
    assert memorised, done.out
    page = place / re.search(r"^With curves, in a browser: (build/demo-\S+/index\.html)$", done.out, re.MULTILINE)[1]
    assert "ZeRO-3, 2 ranks" in page.read_text()


@pytest.mark.faults
def test_the_demo_reports_missing_measurements(bench, place):
    for method in ("ddp", "zero3", "fsdp"):
        (place / f"experiments/demo/{method}/demo.slurm").write_text("echo 'error: no second rank here'\nexit 7\n")
    (place / ".venv").unlink()
    (place / ".venv/bin").mkdir(parents=True)
    (place / ".venv/installed").touch()
    for name in ("lib", "pyvenv.cfg"):
        (place / ".venv" / name).symlink_to(Path(sys.prefix) / name)
    for tool in Path(sys.prefix, "bin").iterdir():
        if tool.name != "psrecord":
            (place / ".venv/bin" / tool.name).symlink_to(tool)
    folders = os.environ["PATH"].split(os.pathsep)
    path = os.pathsep.join(folder for folder in folders if not Path(folder, "psrecord").exists())
    done = demo(bench, place, PATH=path, code=1)
    assert done.out.count("  error: no second rank here\n  failed with exit code 7: read ") == 3
    assert re.search(r"^  missing: psrecord is not installed on ", done.out, re.MULTILINE)
    assert re.search(r"^\| Peak CPU memory of a rank \(MiB\) +\| +[\d.,]+ +\|  +\|", done.out, re.MULTILINE)
    assert "With curves, in a browser: build/demo-" in done.out
    assert "Only 1 of 4 training runs finished" in done.out and "are equal" not in done.out
