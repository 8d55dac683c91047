"""Measure one GPU: the speed of the efficiency knobs, parts of a step, offload, resuming, and ranks that share it.

    python benchmarks/gpu/run.py                              # all items
    python benchmarks/gpu/run.py --groups fast micro          # only these groups
    python benchmarks/gpu/run.py --only all all-longest       # only these items; --help names all
    python benchmarks/gpu/run.py --cpu --only 2r-zero3        # try items without a GPU, with tiny models

README.md in this folder explains the groups and the results. The exit code is 3 if an item fails.
"""

import argparse
import hashlib
import json
import math
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from items import GROUPS, ITEMS, QUESTIONS, REPOSITORY, Item
from processes import become, kill, starter, wait

from checks.machine import last_line
from distributed.rendezvous import free_port
from gpu_check import COLUMNS, figures, training_environment
from reporting.render import grid
from shared.errors import ENVIRONMENT, STOPPED, OneLineErrors, run_program

RESULT = "RESULT "  # prefix of the lines of JSON that programs other than train.py print
SPEED = (
    "samples_per_second tokens_per_second mfu_percent watts joules_per_question sm_percent tensor_percent dram_percent"
)
TOLERANCE = 1e-4  # relative difference of two losses in fp32
STOP_AFTER = 6  # optimizer steps until a training run is stopped, to resume it
CPU_STEPS = 8  # --profile needs seven
# NCCL refuses two ranks on one GPU. Each of these makes it accept them; the second needs NCCL 2.30
TRANSPORTS = {
    "hostid": {"NCCL_HOSTID": "rank-{rank}", "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0"},
    "multi": {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NET_GDR_LEVEL": "LOC"},
}


class Session:
    """Runs items one after the other, and keeps their rows. All items run in `folder`."""

    def __init__(self, folder: Path, cpu: bool, fork: bool, transport: str):
        self.folder, self.cpu, self.transport = folder, cpu, transport
        self.cores = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
        self.environment = training_environment(folder, cpu) | {"HF_HUB_OFFLINE": "1", "REQUIRE_GPU": str(int(not cpu))}
        self.context = starter(fork)
        self.running: list = []
        self.rows: dict[str, dict] = {}

    def start(self, item: Item, job: str, *flags: str) -> None:
        """Start the ranks of an item. job: the name of its record and of its log, to which the ranks append."""
        words = [*item.flags.split(), *flags]
        if item.steps:
            words += ["--max_steps", str(min(item.steps, CPU_STEPS) if self.cpu else item.steps)]
        argv = [str(REPOSITORY / word) if word.endswith((".py", ".json")) else word for word in [item.program, *words]]
        common = self.environment | item.variables | ({"MAX_LENGTH": "128"} if self.cpu else {})
        common |= {"JOB_ID": job, "OMP_NUM_THREADS": str(max(1, self.cores // item.ranks))}
        port = free_port(f"{job} {time.time_ns()}")
        self.running = []
        for rank in range(item.ranks):
            own = common | (self.rank_variables(rank, item.ranks, port) if item.ranks > 1 else {})
            process = self.context.Process(target=become, args=(argv, own, self.folder, self.folder / f"{job}.log"))
            process.start()
            self.running.append(process)

    def rank_variables(self, rank: int, ranks: int, port: int) -> dict[str, str]:
        """Return the variables of a rank. It appears as a node of its own, so that it uses the first GPU."""
        launched = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        own = {name: value.format(rank=rank) for name, value in TRANSPORTS[self.transport].items()}
        interfaces = dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), "lo")
        # A collective's blocks wait for those of the other ranks, so the GPU must have room for the blocks of all ranks
        return launched | own | interfaces | {"NCCL_MAX_CTAS": str(16 // ranks), "NCCL_NVLS_ENABLE": "0"}

    def log(self, job: str) -> str:
        return (self.folder / f"{job}.log").read_text(errors="replace")

    def record(self, job: str) -> dict:
        path = self.folder / "results" / f"{job}.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def forget(self, job: str) -> None:
        """Remove the files of an earlier run of this job, and begin its log."""
        (self.folder / "results" / f"{job}.json").unlink(missing_ok=True)
        shutil.rmtree(self.folder / "output" / job, ignore_errors=True)
        (self.folder / f"{job}.log").write_text("")

    def run(self, item: Item, seconds: float) -> dict:
        """Run an item and return its row."""
        start = time.monotonic()
        row = {"name": item.name, "variables": item.variables, "flags": item.flags, "ranks": item.ranks}
        try:
            row |= self.stop_and_resume(item, seconds) if item.resume else self.measure(item, seconds)
        except Exception as error:  # a mistake in one item must not end the session
            row |= {"status": "failed", "reason": repr(error)}
        finally:
            kill(self.running)
        row["seconds"] = round(time.monotonic() - start, 1)
        return row

    def measure(self, item: Item, seconds: float) -> dict:
        """Run an item to its end. If another program has taken the port, start the item once more."""
        for _ in range(2):
            self.forget(item.name)
            self.start(item, item.name)
            codes = wait(self.running, seconds)
            log, record = self.log(item.name), self.record(item.name)
            if not any(codes) or "EADDRINUSE" not in log:
                break
        row = judge(codes, log, record)
        row["lines"] = [json.loads(line.removeprefix(RESULT)) for line in log.splitlines() if line.startswith(RESULT)]
        shutil.rmtree(self.folder / "output" / item.name, ignore_errors=True)
        if record and row["status"] == "completed":
            row |= figures_of_item(item, record)
            row |= compare_losses(row, item.equal_to, self.rows.get(item.equal_to, {}))
        return row

    def stop_and_resume(self, item: Item, seconds: float) -> dict:
        """Stop a training run with SIGUSR1, resume it, and compare it with a run that was not stopped."""
        ends = time.monotonic() + seconds
        whole, stopped = f"{item.name}-whole", f"{item.name}-stopped"
        codes = []
        for job, *flags in ((whole,), (stopped,), (stopped, "--resume_from_checkpoint")):
            if not flags:
                self.forget(job)
            self.start(item, job, "--logging_steps", "1", *flags)
            if job == stopped and not flags:
                self.send_stop(job, ends)
            codes += wait(self.running, max(0, ends - time.monotonic()))
        jobs = [(self.record(job), self.weights(job)) for job in (whole, stopped)]
        return compare_resumed(codes, *jobs) | {"log": last_line(self.log(stopped))}

    def send_stop(self, job: str, ends: float) -> None:
        (process,) = self.running
        while self.log(job).count("'loss': ") < STOP_AFTER and process.exitcode is None and time.monotonic() < ends:
            time.sleep(0.02)
        if process.exitcode is None:
            os.kill(process.pid, signal.SIGUSR1)

    def weights(self, job: str) -> dict[str, str]:
        """Return the hashes of the files of the saved model."""
        files = sorted((self.folder / "output" / job).glob("*.safetensors"))
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def judge(codes: list[int | None], log: str, record: dict) -> dict:
    """Return the status of a program by the exit codes of its ranks, and the reason if it did not complete."""
    if all(code == 0 for code in codes):
        return {"status": "completed"}
    status = "oom" if record.get("status") == "oom" else "failed" if any(codes) else "timeout"
    return {"status": status, "reason": last_line(log)}


def figures_of_item(item: Item, record: dict) -> dict:
    """Return what the run record says. Ranks that share a GPU have no speed, because they wait for each other."""
    found = figures(record | {"eval": record.get("eval") or [{"loss": None}]})
    if item.ranks > 1:
        found |= dict.fromkeys(SPEED.split())
    kept = ("held", "peak_gpu_memory", "profile", "git", "hardware", "versions", "missing")
    return found | {name: record.get(name) for name in kept}


def compare_losses(row: dict, name: str, other: dict) -> dict:
    """Compare the evaluation loss with that of another row, which must be equal. name: its item."""
    if other.get("eval_loss") is None:
        return {}
    loss = math.inf if row["eval_loss"] is None else row["eval_loss"]
    difference = abs(loss / other["eval_loss"] - 1)
    reason = f"the evaluation loss is {loss:.6f}, that of {name} is {other['eval_loss']:.6f}"
    failed = {} if difference <= TOLERANCE else {"status": "failed", "reason": reason}  # NaN fails, too
    return {"loss_difference": difference} | failed


def compare_resumed(codes: list[int | None], whole: tuple[dict, dict], resumed: tuple[dict, dict]) -> dict:
    """Return whether a run that was stopped and resumed equals a run without a stop, to the last bit.

    codes: exit codes of the run without a stop, of the stopped run, and of the resumed run. whole, resumed: the record
    of a run and the hashes of its saved weights.
    """
    losses = [[entry["loss"] for entry in record.get("eval", [])] for record, _ in (whole, resumed)]
    wrong = {
        f"the exit codes are {codes}, and should be [0, {STOPPED}, 0]": codes != [0, STOPPED, 0],
        f"the evaluation losses are {losses}": not losses[0] or losses[0] != losses[1],
        "the saved weights differ, or there are none": not whole[1] or whole[1] != resumed[1],
    }
    reasons = [reason for reason, is_true in wrong.items() if is_true]
    return {"status": "failed", "reason": "; ".join(reasons)} if reasons else {"status": "completed"}


def make_model(folder: Path, cpu: bool) -> None:
    """Save bloom-560m with random weights, or tiny-bloom, and a tokenizer that is trained on the questions.

    All items load these weights, which is faster than to draw them again for each item.
    """
    from config import DataArguments, ModelArguments
    from model import load_config, random_model, train_tokenizer

    config = load_config(ModelArguments("tiny-bloom" if cpu else "bigscience/bloom-560m", from_scratch=True))
    tokens = min(32768, config.vocab_size)
    train_tokenizer(DataArguments(dataset=QUESTIONS["DATASET"]), tokens).save_pretrained(folder)
    random_model(config, 42).save_pretrained(folder)


def results_page(rows: list[dict]) -> str:
    """Return the table of all items, and one of the lines that programs other than trainings have printed."""
    columns = COLUMNS | {"loss_difference": ("Relative difference", 7)}
    shown = [key for key in columns if any(row.get(key) is not None for row in rows)]
    body = []
    for row in rows:
        values = [row.get(key) for key in shown]
        cells = ["" if x is None else f"{x:,.{columns[key][1]}f}" for key, x in zip(shown, values, strict=True)]
        body.append([row["name"], row["status"], row.get("precision") or "", *cells])
    table = grid(["Item", "Status", "Precision", *(columns[key][0] for key in shown)], body)
    lines = [f"- {row['name']}: {json.dumps(line)}" for row in rows for line in row.get("lines", [])]
    reasons = [f"- {row['name']}: {row['reason']}" for row in rows if "reason" in row]
    return "\n".join([table, "", *reasons, *lines, ""])


def choose(groups: list[str], names: list[str], cpu: bool) -> list[Item]:
    """Return the items of the groups or with the names, and the items with which they are compared."""
    chosen = {item.name for group in groups for item in GROUPS[group]} | set(names) or {item.name for item in ITEMS}
    chosen |= {item.equal_to for item in ITEMS if item.name in chosen}
    return [item for item in ITEMS if item.name in chosen and not (cpu and item.gpu_only)]


def main() -> None:
    parser = OneLineErrors(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", nargs="+", default=[], choices=GROUPS, help=f"some of {', '.join(GROUPS)}")
    names = [item.name for item in ITEMS]
    parser.add_argument("--only", nargs="+", default=[], metavar="ITEM", choices=names, help=", ".join(names))
    parser.add_argument("--cpu", action="store_true", help="run without a GPU, with tiny models, to try the items")
    parser.add_argument(
        "--seconds", type=float, default=1800, help="skip what does not fit into this time (%(default)s)"
    )
    parser.add_argument("--output", type=Path, default=Path("results/gpu"), help="folder of the results (%(default)s)")
    parser.add_argument("--transport", default="hostid", choices=TRANSPORTS, help="how ranks share a GPU (%(default)s)")
    parser.add_argument("--no-fork", action="store_true", help="start each item as a new Python, which is slower")
    arguments = parser.parse_args()
    items = choose(arguments.groups, arguments.only, arguments.cpu)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    ends = time.monotonic() + arguments.seconds
    folder = arguments.output.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    session = Session(folder, arguments.cpu, not arguments.no_fork, arguments.transport)
    if any(item.variables.get("MODEL_NAME") == "./model" for item in items):
        make_model(folder / "model", arguments.cpu)
    with (folder / "items.jsonl").open("w", buffering=1) as lines:
        for item in items:
            left = ends - time.monotonic()
            row = {"name": item.name, "status": "skipped", "reason": "too little time is left"}
            if left > item.guard / 3:
                row = session.run(item, min(left, item.guard))
            session.rows[item.name] = row
            lines.write(json.dumps(row) + "\n")
            reason = f" ({row['reason']})" if "reason" in row else ""
            print(f"{item.name}: {row['status']}{reason}, {row.get('seconds', 0)} s", flush=True)
    page = results_page(list(session.rows.values()))
    (folder / "items.md").write_text(page)
    print(f"\n{page}\nwritten: {folder}/items.jsonl, {folder}/items.md and the run records in {folder}/results")
    if any(row["status"] not in ("completed", "skipped") for row in session.rows.values()):
        sys.exit(ENVIRONMENT)


if __name__ == "__main__":
    run_program(main)
