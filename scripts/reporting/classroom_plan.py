"""Plan a class: the jobs that pairs and instructor submit, by experiments/agendas.yaml, and what these jobs take.

The blocks of the pages, experiments/afternoon.sh, `report.py --people` and the columns of `--class` come from here.
"""

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from job.directives import gpus_per_node, limit_hours, parse_count, read_directives
from reporting.classroom_runs import select_experiments
from reporting.render import describe_hardware, grid, plural
from reporting.runs import Missing, ReportedRun
from shared.paths import EXPERIMENTS, REPOSITORY

AGENDAS = yaml.safe_load((EXPERIMENTS / "agendas.yaml").read_text(encoding="utf-8"))
SECTIONS: dict[str, dict] = {page: entry for group in AGENDAS["sections"].values() for page, entry in group.items()}


def directives(experiment: str) -> dict[str, str]:
    return read_directives(next((EXPERIMENTS / experiment).glob("*.slurm")))


def gpus(experiment: str) -> int:
    asked = directives(experiment)
    return parse_count(asked["nodes"]) * gpus_per_node(asked)


def gpu_hours(experiment: str, limit: str = "") -> float:
    """Return the GPU-hours that a job takes at most. limit: a time limit that replaces the one of its script."""
    return gpus(experiment) * limit_hours(limit or directives(experiment)["time"])


def choices(page: str, kind: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the numbers of jobs of a section, each with the experiments among which a pair chooses.

    kind: "pair" for the jobs of each pair, "shared" for those that the instructor submits for all.
    """
    named = [entry for each in ("pair", "shared") for entry in SECTIONS[page].get(each, [])]
    for entry in SECTIONS[page].get(kind, []):
        number, _, pattern = entry.rpartition(" of ")
        among = select_experiments([pattern], "experiments/agendas.yaml")
        # The class runs the experiments of the other entries in any case
        yield int(number or 1), [name for name in among if name == entry or name not in named]


@dataclass
class ClassPlan:
    """The jobs of a class during an agenda. free_gpus: the GPUs that the class has."""

    people: int = 20
    free_gpus: int = 16
    agenda: str = "afternoon"

    @property
    def pairs(self) -> int:
        return math.ceil(self.people / 2)  # one person of an odd number counts as a pair

    @property
    def pages(self) -> list[str]:
        return [row["page"] for row in AGENDAS["agendas"][self.agenda]["rows"] if "page" in row]

    def jobs(self) -> dict[str, list[tuple[int, list[str]]]]:
        """Map each section, and "shared", to its numbers of jobs, as in `choices`.

        Jobs that need more GPUs than the class has are left out.
        """
        found = {page: [(self.pairs * number, among) for number, among in choices(page, "pair")] for page in self.pages}
        found["shared"] = [choice for page in self.pages for choice in choices(page, "shared")]
        fits = {name: [job for job in jobs if max(map(gpus, job[1])) <= self.free_gpus] for name, jobs in found.items()}
        return {name: jobs for name, jobs in fits.items() if jobs}

    def needs(self, limit: str = "") -> list[dict[str, Any]]:
        """Return the rows of a table: what each section needs, what the shared jobs need, and the sums.

        Where a pair chooses, its largest experiment counts. limit: a time limit for a further column of GPU-hours.
        """
        rows: list[dict[str, Any]] = []
        heads = {"GPU-hours at most": ""} | ({f"with SBATCH_TIMELIMIT={limit}": limit} if limit else {})
        for name, jobs in self.jobs().items():
            used = sum(number * max(map(gpus, among)) for number, among in jobs)
            row = {
                "Section": label(name) if name in SECTIONS else name,
                "Jobs": sum(number for number, _ in jobs),
                "GPUs that all jobs ask for": used,
                f"Turns on {self.free_gpus} GPUs": math.ceil(used / self.free_gpus),
            }
            for head, given in heads.items():
                row[head] = sum(number * max(gpu_hours(each, given) for each in among) for number, among in jobs)
            rows.append(row)
        return [*rows, {"Section": "All"} | {key: sum(row[key] for row in rows) for key in [*rows[0]][1:]}]

    def experiments(self, shared: bool) -> list[str]:
        """Return the experiments among which pairs choose, and with `shared` those that the instructor submits."""
        found = [choice for name, jobs in self.jobs().items() for choice in jobs if shared or name != "shared"]
        return list(dict.fromkeys(name for _, among in found for name in among))

    def describe(self, runs: list[ReportedRun]) -> str:
        """Return what the class needs, and the minutes that its jobs took in `runs`, for the terminal."""
        needs = self.needs(os.environ.get("SBATCH_TIMELIMIT", ""))
        lines = [[str(round(value) if isinstance(value, float) else value) for value in row.values()] for row in needs]
        minutes = {
            name: measured_minutes([run for run in runs if run.experiment == name]) for name in self.experiments(True)
        }
        measured = [[name, str(gpus(name)), *each] for name, each in minutes.items() if each]
        return "\n".join(
            [
                f"People: {self.people} ({plural(self.pairs, 'pair')}{', one of a single person' * (self.people % 2)})",
                f"GPUs:   {self.free_gpus} (change this with --gpus)",
                "",
                grid([*needs[0]], lines),
                "",
                "shared: the instructor submits these jobs for the class.",
                f"Turns: the rounds in which {self.free_gpus} GPUs can run all jobs of a row.",
                "GPU-hours at most: GPUs x time limit of the job scripts. Most jobs end much earlier.",
                "",
                *([grid(["Experiment", "GPUs", "Minutes, measured"], measured), ""] if measured else []),
                f"Not measured, without a completed run: {len(minutes) - len(measured)} of {len(minutes)} experiments.",
            ]
        )


def label(page: str) -> str:
    """Return the number of a section, as its heading says it, and the name of its page."""
    return " ".join([*re.findall(r"\A# (\d+)", (REPOSITORY / f"docs/{page}.md").read_text(encoding="utf-8")), page])


def measured_minutes(runs: list[ReportedRun]) -> list[str]:
    """Return a cell with the minutes of the longest completed run and its hardware; no cell if no run completed."""
    found = {hours: run for run in runs if run.completed and not isinstance(hours := run.hours(), Missing)}
    return [
        f"{60 * hours:.1f} ({plural(len(found), 'run')}, {describe_hardware(found[hours])})"
        for hours in sorted(found)[-1:]
    ]
