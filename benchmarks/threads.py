"""Compare how long OpenMP's threads wait in a loop before they sleep, on an idle and on a busy machine without a GPU.

    python benchmarks/threads.py                    # all rows, three times each; the 560m row needs 12 GB of memory
    python benchmarks/threads.py --repeats 5 --rows tiny "tiny, busy"
    python benchmarks/threads.py --repeats 1 --steps 2 --model tiny-bloom --parameters 1000000    # a trial of this file

Each row takes turns with the settings of SETTINGS within each repeat, so that a slow phase of the machine does not
affect only one of them. The ratio of a setting is the median of its ratios to the default within the repeats. `brief`
is what train.py sets (scripts/shared/before_imports.py).

    tiny                24 steps of tiny-bloom: train_runtime
    tiny, busy          the same next to 8 busy loops (--loops)
    560m                3 steps with the shapes of bloom-560m (--model), one question of up to 128 tokens
    offloaded optimizer a step of PyTorch's fused AdamW over 100 million parameters, as with ZeRO-2 and CPU offload:
                        the median of 10 steps

Other programs falsify the rows of an idle machine, so the load average is printed before each run.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from harness import RESULT, SAMPLE, SCRIPTS, commit, cpu, read_result, run_training, versions

CORES = str(len(os.sched_getaffinity(0)))
SETTINGS = {
    "default": {"GOMP_SPINCOUNT": "300000", "OMP_NUM_THREADS": CORES},  # libgomp's own default
    "brief": {"GOMP_SPINCOUNT": "1000", "OMP_NUM_THREADS": CORES},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
ROWS = ("tiny", "tiny, busy", "560m", "offloaded optimizer")
OPTIMIZER_STEPS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24, help="of the two tiny rows")
    parser.add_argument("--loops", type=int, default=8, help="busy loops next to `tiny, busy`")
    parser.add_argument("--model", default="bigscience/bloom-560m", help="of the row 560m, with random weights")
    parser.add_argument("--parameters", type=int, default=100_000_000, help="of the row `offloaded optimizer`")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        time_optimizer(arguments.parameters)
        return
    print(f"commit {commit()}, {CORES} cores, {cpu()}, {json.dumps(versions())}", flush=True)
    table = ["| row | setting | seconds | all | ratio |", "| --- | --- | --- | --- | --- |"]
    for row in arguments.rows:
        table += table_lines(row, measure(row, arguments))
    print("\n".join(table))


def measure(row: str, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of each setting, one value per repeat."""
    found: dict[str, list[float]] = {name: [] for name in SETTINGS}
    for repeat in range(arguments.repeats):
        for name in SETTINGS:
            load = os.getloadavg()[0]
            found[name].append(run(row, arguments, SETTINGS[name]))
            print(f"  {repeat + 1}. {row}, {name}: {found[name][-1]:.3f} s, load {load:.1f}", flush=True)
    return found


def run(row: str, arguments: argparse.Namespace, variables: dict[str, str]) -> float:
    """Return the seconds of a row with these variables."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if row == "offloaded optimizer":
            output, _ = run_training(folder, [__file__, "--child", f"--parameters={arguments.parameters}"], **variables)
            return read_result(output)["seconds"]
        if row == "560m":
            flags = ["--model_name", arguments.model, "--from_scratch", "--max_length", "128", "--max_steps", "3"]
            flags += ["--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "1"]
        else:
            flags = ["--model_name", "tiny-bloom", "--max_steps", str(arguments.steps)]
        flags += ["--dataset", str(SAMPLE), "--eval_size", "8", "--eval_strategy", "no", "--save_strategy", "no"]
        words = [str(SCRIPTS / "train.py"), "--use_cpu", "--bf16", "False", "--no_em_f1", *flags]
        with busy_loops(arguments.loops if row == "tiny, busy" else 0):
            _, record = run_training(folder, words, **variables)
    return record["train"]["runtime_s"]


@contextlib.contextmanager
def busy_loops(number: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def time_optimizer(parameters: int) -> None:
    """Print the seconds of a step of the fused AdamW on the CPU."""
    import torch

    weight = torch.nn.Parameter(torch.zeros(parameters))
    weight.grad = torch.ones(parameters)
    optimizer = torch.optim.AdamW([weight], fused=True)
    seconds = []
    for _ in range(OPTIMIZER_STEPS + 1):
        start = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    print(RESULT + json.dumps({"seconds": statistics.median(seconds[1:])}))  # the first step allocates the moments


def table_lines(row: str, found: dict[str, list[float]]) -> list[str]:
    lines = []
    for name, seconds in found.items():
        ratio = statistics.median(own / default for own, default in zip(seconds, found["default"], strict=True))
        values = ", ".join(f"{each:.3f}" for each in seconds)
        lines.append(f"| {row} | {name} | {statistics.median(seconds):.3f} | {values} | {ratio:.2f}x |")
    return lines


if __name__ == "__main__":
    main()
