"""Tables from run records.

python scripts/report.py --job results/123.json        # the baseline summary of one run
"""

import argparse
import json
from pathlib import Path

from errors import OneLineErrors, fail

NOTES = {
    "loss": "mean over all steps, as the Trainer reports it",
    "speed": "the Trainer's: evaluation and saving included",
}


def read_record(path: Path) -> dict:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(record, dict) or "settings" not in record:
            raise ValueError("no settings in it")
        return record
    except OSError as error:
        fail(path, error.strerror or "cannot be read", "give results/<job_id>.json of a run")
    except ValueError as error:
        fail(path, f"is no run record ({error})", "give results/<job_id>.json of a run")


def baseline_summary(record: dict) -> list[tuple[str, str, str]]:
    """Metric, value and note of the workshop's baseline table; a missing value is empty, with its reason."""
    train, evaluations = record.get("train") or {}, record.get("eval") or []
    rows = [("Train Loss (Final)", train.get("loss_mean"), NOTES["loss"])]
    for entry in evaluations:
        rows.append((f"Eval Loss (Epoch {entry['epoch']:g})", entry["loss"], ""))
    rows.append(("Training Speed (samples/sec)", train.get("samples_per_second"), NOTES["speed"]))
    steady = train.get("steady_samples_per_second")
    rows.append(("  steps alone (samples/sec)", steady, f"{train.get('steady_steps', 0)} steps, warm-up left out"))
    speed = evaluations[-1]["samples_per_second"] if evaluations else None
    rows.append(("Evaluation Speed (samples/sec)", speed, "last epoch"))
    rows.append(("Steps per Epoch", record.get("steps_per_epoch"), "optimizer steps"))
    for name, key in (("Exact Match (%)", "exact_match"), ("F1 (%)", "f1")):
        if record["settings"].get("em_f1"):
            rows.append((name, record.get(key), f"{record['eval_size']} questions"))
    return [(name, number(value), note if value is not None else reason(record, name)) for name, value, note in rows]


def number(value: float | None) -> str:
    return "" if value is None else f"{value}" if isinstance(value, int) else f"{value:.4g}"


def reason(record: dict, row: str) -> str:
    """Why the value of a row is missing."""
    if record["status"] != "completed":
        return f"the run is {record['status']}"
    missing = record.get("missing", {})
    return missing.get("train.steady_samples_per_second", "not measured") if "steps alone" in row else "not measured"


def render(rows: list[tuple[str, str, str]], header: tuple[str, str, str]) -> str:
    """A Markdown table that is readable as it stands."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(3)]
    lines = [header, tuple("-" * width for width in widths), *rows]
    return "\n".join("| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
                     for line in lines)  # fmt: skip


def main() -> None:
    parser = OneLineErrors(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", type=Path, required=True, help="run record of the job")
    path = parser.parse_args().job
    record = read_record(path)
    print(f"\nBaseline summary of {record['job_id']} ({record['status']}, {record['settings']['model_name']})\n")
    print(render(baseline_summary(record), ("Metric", "Value", "Note")))
    output = Path(record["output_dir"])
    print(f"\nmodel:      {output if (output / 'config.json').exists() else 'not saved'}")
    print(f"run record: {path}")


if __name__ == "__main__":
    main()
