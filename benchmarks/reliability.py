"""Measure the cost of the stop agreement, of checkpoint markers and of heartbeats, within one training run.

    python benchmarks/reliability.py                  # two ranks on the CPU, DDP, a BLOOM of 51 million parameters
    python benchmarks/reliability.py --ranks 4 --steps 40

Everything is measured inside one run, because two runs on a busy machine differ by more than these costs. The figures
are rank 0's. The seconds of the stop agreement include rank 0's wait for the slower ranks. On 2 cores of an AMD EPYC:

    20 steps of 7623 ms, 4 saves of 1322 ms
    agreement on a stop, per step       10.133 ms x  20 =   0.13 % of the training
    heartbeat                            0.005 ms x  51 =   0.00 % of the training
    marker, per save                     0.700 ms x   4 =   0.05 % of the save
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

from harness import RESULT, SAMPLE, SCRIPTS, read_result, run_training

CONFIG = {"model_type": "bloom", "vocab_size": 50000, "hidden_size": 512, "n_layer": 8, "n_head": 8, "use_cache": False}
# Program that runs train.py and times calls of the measured functions
TIMED = """
import atexit, functools, json, os, sys, time
sys.path.insert(0, {scripts!r})
import train
from distributed import watchdog
from training import checkpoints, stopping, trainer
times = {{}}

def timed(holder, name, label):
    original = getattr(holder, name)
    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        start = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            times.setdefault(label, []).append(time.perf_counter() - start)
    setattr(holder, name, wrapper)

timed(stopping.StopCallback, "on_step_end", "agreement")
timed(watchdog, "progress", "heartbeat")
timed(checkpoints, "mark_complete", "marker")
timed(trainer.WorkshopTrainer, "_save_checkpoint", "save")
timed(trainer.WorkshopTrainer, "training_step", "forward and backward")
timed(trainer.WorkshopTrainer, "_run_epoch", "epoch")

def report():
    if os.environ.get("RANK", "0") == "0":
        print({result!r} + json.dumps(times), flush=True)

atexit.register(report)
train.run_and_exit(train.main)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        print(table(measure(Path(name), arguments.ranks, arguments.steps), arguments.steps))


def measure(folder: Path, ranks: int, steps: int) -> dict[str, list[float]]:
    """Train, and return the seconds of each call by label."""
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text(json.dumps(CONFIG))
    script = folder / "timed.py"
    script.write_text(TIMED.format(scripts=str(SCRIPTS), result=RESULT))
    words = [str(script), "--model_name", "./model", "--from_scratch", "--tokenizer_name", "tiny-bloom", "--no_em_f1"]
    words += ["--dataset", str(SAMPLE), "--train_size", "128", "--eval_size", "8"]
    words += ["--max_length", "256", "--gradient_accumulation_steps", "1", "--max_steps", str(steps)]
    words += ["--save_strategy", "steps", "--save_steps", str(max(1, steps // 4)), "--eval_strategy", "no"]
    threads = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    output, _ = run_training(folder, words, ranks, OMP_NUM_THREADS=threads)
    return read_result(output)


def table(times: dict[str, list[float]], steps: int) -> str:
    """Table of the costs: milliseconds per call, number of calls, and share of the training or of the saves."""
    saves = sum(times["save"]) + sum(times["marker"])
    training = sum(times["epoch"]) - saves
    rows = [
        ("agreement on a stop, per step", times["agreement"], training, "of the training"),
        ("heartbeat", times["heartbeat"], training, "of the training"),
        ("marker, per save", times["marker"], sum(times["save"]), "of the save"),
    ]
    lines = [f"{steps} steps of {1000 * training / steps:.0f} ms, {len(times['save'])} saves of "
             f"{1000 * sum(times['save']) / len(times['save']):.0f} ms"]  # fmt: skip
    for name, calls, total, share_name in rows:
        mean = 1000 * sum(calls) / len(calls)
        lines.append(f"{name:32s} {mean:9.3f} ms x {len(calls):3d} = {100 * sum(calls) / total:6.2f} % {share_name}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
