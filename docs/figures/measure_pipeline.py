"""Run the solution of exercises/pipeline.py, and store in pipeline.json when each rank computed in the last step.

OMP_NUM_THREADS=1 torchrun --nproc_per_node=4 docs/figures/measure_pipeline.py gpipe      # and again with 1f1b
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
STORED = HERE / "pipeline.json"
sys.path.insert(0, str(HERE.parents[1] / "exercises" / "solution"))

import pipeline  # noqa: E402


def store(spans: list[list[tuple]], schedule: str, _: str) -> None:
    """Store the spans of each rank, in seconds from the first one's begin."""
    start = min(begin for rank_spans in spans for _, _, begin, _ in rank_spans)
    ranks = [
        [(what, micro, round(begin - start, 4), round(end - start, 4)) for what, micro, begin, end in rank_spans]
        for rank_spans in spans
    ]
    runs = json.loads(STORED.read_text()) if STORED.exists() else {}
    STORED.write_text(json.dumps(runs | {schedule: ranks}) + "\n")


if __name__ == "__main__":
    pipeline.save_picture = store  # rank 0 calls this function, because of --picture
    sys.argv[1:] = ["--schedule", sys.argv[1], "--picture", str(STORED)]
    pipeline.main()
