"""Tables from run records.

python scripts/report.py --job results/123.json        # the baseline summary of one run
"""

import argparse
import json
from pathlib import Path

from errors import fail

NOTES = {
    "loss": "mean over all steps, as the Trainer reports it",
    "speed": "the Trainer's: evaluation and saving included",
}


def read_record(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        fail(path, error.strerror or "cannot be read", "give results/<job_id>.json of a run")
    except ValueError as error:
        fail(path, f"is no run record ({error})", "give results/<job_id>.json of a run")


def baseline_summary(record: dict) -> list[tuple[str, str, str]]:
    """Metric, value and note of the workshop's baseline table; a missing value is empty, with its reason."""
    train, evaluations = record.get("train") or {}, record.get("eval") or []
    missing = f"the run is {record['status']}"
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
        if key in record:
            rows.append((name, record[key], f"{record['eval_size']} questions"))
    return [(name, "" if value is None else f"{value:.4g}", note if value is not None else missing)
            for name, value, note in rows]  # fmt: skip


def render(rows: list[tuple[str, str, str]], header: tuple[str, str, str]) -> str:
    """A Markdown table that is readable as it stands."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(3)]
    lines = [header, tuple("-" * width for width in widths), *rows]
    return "\n".join("| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
                     for line in lines)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
