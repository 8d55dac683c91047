"""Count the files that a rank of train.py opens, and its other calls such as stat, until it prints its first line.

    python benchmarks/imports.py     # needs strace, squashfs-tools, squashfuse and fuse3

The environment of this Python lies on disk, or in one squashfs image, which a node mounts or unpacks into its memory.
The table has the calls of a rank to the environment, and those of a node to the image. On a shared file system, each
is a request to its server if nothing is cached. docs/environment.md shows the results.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import SAMPLE, SCRIPTS

KNOBS = {"MODEL_NAME": "tiny-bloom", "DATASET": str(SAMPLE), "TRAIN_SIZE": "4", "EVAL_SIZE": "2", "SAVE_STRATEGY": "no"}
TRACE = ["strace", "-f", "-qq", "-y", "-s", "1", "-e", "trace=%file,write", "-o"]


def main() -> None:
    environment = Path(sys.prefix).resolve()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        image, mounted, unpacked, log = (Path(name, part) for part in ("image", "mounted", "unpacked", "log"))
        subprocess.run(["mksquashfs", environment, image, "-quiet", "-no-progress"], check=True)
        print("| environment | asked by | opened files | other calls |\n| --- | --- | --- | --- |")
        train(environment, log)
        show("on disk", "each rank", log, environment)
        mounted.mkdir()
        squashfuse = subprocess.Popen([*TRACE, log, "squashfuse", "-f", image, mounted])
        while not os.path.ismount(mounted):
            squashfuse.poll()
        train(mounted, Path(name, "rank"))
        subprocess.run(["fusermount3", "-u", mounted], check=True)
        squashfuse.wait()
        show("mounted image", "each node", log, image)
        subprocess.run([*TRACE, log, "unsquashfs", "-quiet", "-no-progress", "-d", unpacked, image], check=True)
        show("unpacked image", "each node", log, image)
        train(unpacked, log)


def train(environment: Path, log: Path) -> None:
    """Train for a step with this environment. Write its calls into a log."""
    command = [environment / "bin/python", SCRIPTS / "train.py", "--max_steps", "1"]
    variables = os.environ | KNOBS | {"JOB_ID": environment.name.strip("."), "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([*TRACE, log, *command], cwd=log.parent, env=variables, stdout=subprocess.PIPE, check=True)


def show(case: str, who: str, log: Path, path: Path) -> None:
    """Print a row: the calls in a log that name this path, up to the first line on stdout."""
    lines = re.split(r"\bwrite\(1<", log.read_text())[0].splitlines()
    calls = [line for line in lines if str(path) in line]
    opened = [line for line in calls if re.search(r"\bopenat\(.*\) = \d", line)]
    print(f"| {case} | {who} | {len(opened):,} | {len(calls) - len(opened):,} |", flush=True)


if __name__ == "__main__":
    main()
