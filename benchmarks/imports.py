"""Count the calls to a file system until a rank of train.py prints its first line.

    python benchmarks/imports.py     # needs strace, squashfs-tools, squashfuse and fuse3

The environment of this Python lies on disk, or in one squashfs image, which a node mounts or unpacks into its memory.
The table gives the calls of a rank to the environment, and those of a node to the image. Each is a request to a server
if the file system is shared and has nothing cached. docs/environment.md shows the results.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import SAMPLE, SCRIPTS

OPEN = re.compile(r"\bopen(at)?\(.*\) = \d")
READ = re.compile(r"\bp?read(64)?\(")
KNOBS = {"MODEL_NAME": "tiny-bloom", "DATASET": str(SAMPLE), "TRAIN_SIZE": "4", "EVAL_SIZE": "2", "SAVE_STRATEGY": "no"}
TRACE = ["strace", "-f", "-qq", "-y", "-s", "1", "-e", "trace=%file,read,pread64,write", "-o"]


def main() -> None:
    environment = Path(sys.prefix).resolve()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder, image = Path(name), Path(name, "image")
        mounted, unpacked = folder / "mounted", folder / "unpacked"
        subprocess.run(["mksquashfs", environment, image, "-quiet", "-no-progress"], check=True)
        mounted.mkdir()
        print("| environment | asked by | opens | stat and other calls | reads |\n| --- | --- | --- | --- | --- |")
        show("on disk", "each rank", rank(environment, folder), environment)
        squashfuse = subprocess.Popen([*TRACE, folder / "fuse.log", "squashfuse", "-f", image, mounted])
        while not os.path.ismount(mounted):
            squashfuse.poll()
        rank(mounted, folder)
        subprocess.run(["fusermount3", "-u", mounted], check=True)
        squashfuse.wait()
        show("mounted image", "each node", folder / "fuse.log", image)
        log = folder / "unpack.log"
        subprocess.run([*TRACE, log, "unsquashfs", "-quiet", "-no-progress", "-d", unpacked, image], check=True)
        show("unpacked image", "each node", log, image)
        rank(unpacked, folder)


def rank(environment: Path, folder: Path) -> Path:
    """Train for a step with this environment, and return the log of its calls up to the first line."""
    log = folder / "rank.log"
    command = [environment / "bin/python", SCRIPTS / "train.py", "--max_steps", "1"]
    variables = os.environ | KNOBS | {"JOB_ID": environment.name.strip("."), "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([*TRACE, log, *command], cwd=folder, env=variables, stdout=subprocess.PIPE, check=True)
    lines = log.read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if re.search(r"\bwrite\(1<", line))
    log.write_text("\n".join(lines[:first]))
    return log


def show(case: str, who: str, log: Path, path: Path) -> None:
    """Print a row: the calls in a log that name this path."""
    calls = [line for line in log.read_text().splitlines() if str(path) in line]
    opens, reads = (sum(map(bool, map(pattern.search, calls))) for pattern in (OPEN, READ))
    print(f"| {case} | {who} | {opens:,} | {len(calls) - opens - reads:,} | {reads:,} |", flush=True)


if __name__ == "__main__":
    main()
