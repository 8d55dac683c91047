"""Plan a class: the jobs that pairs and instructor submit, by experiments/agendas.yaml, and what these jobs take.

The blocks of the pages, experiments/afternoon.sh, `report.py --people` and the columns of `--class` come from here.
"""

import math
import os
from dataclasses import dataclass
from typing import Any

import yaml

from job.directives import gpus_per_node, limit_hours, parse_count, read_directives
from reporting.classroom_runs import select_experiments
from reporting.render import describe_hardware, grid, plural
from reporting.runs import Missing, ReportedRun
from shared.paths import EXPERIMENTS

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


def choices(page: str, kind: str) -> list[tuple[int, list[str]]]:
    """Return the numbers of jobs of a section, each with the experiments among which a pair chooses.

    kind: "pair" for the jobs of each pair, "shared" for those that the instructor submits for all.
    """
    named = [entry for each in ("pair", "shared") for entry in SECTIONS[page].get(each, [])]
    found = []
    for entry in SECTIONS[page].get(kind, []):
        number, _, pattern = entry.rpartition(" of ")
        among = select_experiments([pattern], "experiments/agendas.yaml")
        # The class runs the experiments of the other entries in any case
        found.append((int(number or 1), [name for name in among if name == entry or name not in named]))
    return found


@dataclass
class ClassPlan:
    """The jobs of a class during an agenda. free_gpus: the GPUs that the class has."""

    people: int = 20
    free_gpus: int = 16
    agenda: str = "afternoon"

    @property
    def pages(self) -> list[str]:
        return [row["page"] for row in AGENDAS["agendas"][self.agenda]["rows"] if "page" in row]

    def jobs(self) -> dict[str, list[tuple[int, list[str]]]]:
        """Map each section, and "shared", to its numbers of jobs, as in `choices`.

        Jobs that need more GPUs than the class has are left out.
        """
        pairs = math.ceil(self.people / 2)  # one person of an odd number works alone
        found = {page: [(pairs * number, among) for number, among in choices(page, "pair")] for page in self.pages}
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
            row = {"Section": name, "Jobs": sum(number for number, _ in jobs), "GPUs, all jobs together": used}
            row[f"Turns on {self.free_gpus} GPUs"] = math.ceil(used / self.free_gpus)
            for head, given in heads.items():
                row[head] = sum(number * max(gpu_hours(each, given) for each in among) for number, among in jobs)
            rows.append(row)
        return [*rows, {"Section": "All"} | {key: sum(row[key] for row in rows) for key in [*rows[0]][1:]}]

    def experiments(self, shared: bool) -> list[str]:
        """Return the experiments among which pairs choose, and with `shared` those that the instructor submits."""
        found = [choice for name, jobs in self.jobs().items() for choice in jobs if shared or name != "shared"]
        return list(dict.fromkeys(name for _, among in found for name in among))

    def describe(self, runs: list[ReportedRun]) -> str:
        """Return two tables for the terminal: what the class needs, and the minutes that each job took in `runs`."""
        needs = self.needs(os.environ.get("SBATCH_TIMELIMIT", ""))
        lines = [[str(round(value) if isinstance(value, float) else value) for value in row.values()] for row in needs]
        names = self.experiments(shared=True)
        jobs = [[n, str(gpus(n)), measured_minutes([run for run in runs if run.experiment == n])] for n in names]
        return "\n\n".join([grid([*needs[0]], lines), grid(["Experiment", "GPUs", "Minutes, measured"], jobs)])


def measured_minutes(runs: list[ReportedRun]) -> str:
    """Return the minutes of the longest completed run, with its hardware."""
    found = {hours: run for run in runs if run.completed and not isinstance(hours := run.hours(), Missing)}
    if not found:
        return "not measured: no completed run"
    longest = max(found)
    return f"{60 * longest:.1f} ({plural(len(found), 'run')}, {describe_hardware(found[longest])})"
