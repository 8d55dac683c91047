"""End of a job: write into the run record how it ended, and print a summary for its log.

    PYTHONPATH=scripts python -m job.finish 4711 --exit-code 0     # in the folder of the experiment; job.sh does this

It must be done in the seconds between SIGTERM and SIGKILL, so nothing large is imported here.
"""

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path

from errors import run_program
from json_files import write_json
from reporting.memory_logs import MemoryLog, host_of, logs_of, read_cpu_log, read_gpu_log


def outcome(exit_code: int) -> str:
    """Status of a run that ended with this exit code."""
    return {0: "completed", 75: "stopped", 130: "stopped", 143: "stopped"}.get(exit_code, "failed")


def finish(path: Path, status: str, exit_code: int) -> dict:
    content = json.loads(path.read_text(encoding="utf-8"))
    content |= {"status": status, "exit_code": exit_code, "finished": now()}
    write_json(path, content)
    return content


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def finish_record(path: Path, status: str | None, exit_code: int) -> dict:
    """The finished record. What the training itself wrote down stays, unless the job knows better."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if content["status"] == "completed" and exit_code == 0:
        return content
    if content["status"] in ("oom", "failed") and content["exit_code"] == exit_code and not status:
        return content
    if content["status"] == "oom":
        status = "oom"
    return finish(path, status or outcome(exit_code), exit_code)


def summary(job_id: str, record: dict | None, status: str, exit_code: int, gaps: list[str]) -> list[str]:
    """Lines for the end of the log: status, memory per GPU and process, throughput, and what is missing."""
    rows = [f"status: {status} (exit code {exit_code})"]
    missing = list(gaps)
    gpu_logs, cpu_logs = logs_of(Path(), job_id)
    for log in [*map(read_gpu_log, gpu_logs), *map(read_cpu_log, cpu_logs)]:
        rows += memory_rows(log, missing)
    train = (record or {}).get("train")
    if train:
        steady = train["steady_samples_per_second"]
        rows.append(
            f"samples per second: {train['samples_per_second']:.2f} (Trainer)"
            + (f", {steady:.2f} (steps alone)" if steady else "")
        )
    elif record is None:
        why = "the job ended before the training began" if exit_code else "the job is no training itself"
        missing.append(f"no run record: {why}")
    else:
        missing.append("samples per second: the training did not finish")
    return [*rows, *(f"missing: {gap}" for gap in missing)]


def memory_rows(log: MemoryLog, missing: list[str]) -> list[str]:
    missing += log.gaps()
    if not log.samples:
        missing.append(f"{log.path}: no sample")
    where = f" on {host_of(log.path)}" if host_of(log.path) else ""
    return [
        f"{'CPU' if name == 'process' else f'GPU {name}'} memory{where}: peak {log.peak(name):.0f} MiB, "
        f"mean {log.mean(name):.0f} MiB ({len(log.samples[name])} samples)"
        for name in log.names()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job_id")
    parser.add_argument("--exit-code", type=int, required=True, help="of the training")
    parser.add_argument("--status", choices=["stopped", "timeout", "oom"], help="when the job knows it")
    parser.add_argument("--gaps", type=Path, help="file with a line for each log that is not complete")
    arguments = parser.parse_args()
    path = Path("results") / f"{arguments.job_id}.json"
    record = None
    status = arguments.status or outcome(arguments.exit_code)
    if path.exists():
        record = finish_record(path, arguments.status, arguments.exit_code)
        status = record["status"]
    gaps = arguments.gaps.read_text().splitlines() if arguments.gaps and arguments.gaps.exists() else []
    print("\n".join(["", "=" * 60, *summary(arguments.job_id, record, status, arguments.exit_code, gaps), "=" * 60]))


if __name__ == "__main__":
    run_program(main)
