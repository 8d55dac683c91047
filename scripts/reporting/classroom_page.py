"""Render the class as one HTML page, from class.html, page.css and class.css in this folder.

All texts from the clones pass through `Names.hide`, because the page may be projected without names.
"""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from config import facts
from reporting.classroom_runs import ClassCell, ClassReader, Participant
from reporting.page import GENERATOR, content_policy, page_environment
from reporting.render import describe_gpu_hours
from reporting.runs import INCOMPLETE, Missing, ReportedRun
from reporting.tables import traits
from reporting.trainer_log import done_percent, find_log, last_error, log_end


class State(NamedTuple):
    """A state of a cell: its letter, its name, and its class in class.css."""

    letter: str
    name: str
    style: str


STATES = {
    "": State("·", "not yet", "none"),
    "waiting": State("W", "waiting", "waiting"),
    "running": State("R", "running", "running"),
    "completed": State("D", "done", "done"),
    "failed": State("F", "failed", "failed"),
    "oom": State("O", "out of memory", "oom"),
    "stopped": State("S", "stopped or timeout", "stopped"),
    "unreadable": State("?", "unreadable", "unreadable"),
}
OTHER_STATUSES = {INCOMPLETE: "failed", "timeout": "stopped"}
FAILURES = ("failed", "oom", "stopped")


def state_name(run: ReportedRun | None) -> str:
    """Return the key of a run's state in STATES."""
    if run and run.unreadable:
        return "unreadable"
    return OTHER_STATUSES.get(run.status, run.status) if run else ""


class Names:
    """The names of the participants on the page: as they are, or as numbers."""

    def __init__(self, participants: list[Participant], numbers: bool):
        self.shown = {each.name: str(i) if numbers else each.name for i, each in enumerate(participants, 1)}
        clones = {path for each in participants for path in (str(each.clone), os.path.realpath(each.clone))}
        self.folders = sorted(clones, key=len, reverse=True)
        words: dict[str, str] = {}
        owners = [owner(each.clone) for each in participants]
        for (name, number), user in zip(self.shown.items(), owners, strict=True) if numbers else ():
            # A user who owns several clones is not a participant. The digits of a name that is a number may be part
            # of a message
            own = {name, *name.split("/"), user if owners.count(user) == 1 else ""}
            words |= {word.lower(): number for word in own if word and not word.isdigit()}
        self.words = words
        alternatives = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
        self.pattern = re.compile(rf"(?<![a-z0-9])(?:{alternatives})(?![a-z0-9])", re.IGNORECASE) if words else None

    def hide(self, text: str) -> str:
        """Shorten the paths of the clones in a text, and replace the participants' names by their numbers."""
        for folder in self.folders:
            text = text.replace(f"{folder}/", "")
        return self.pattern.sub(lambda match: self.words[match[0].lower()], text) if self.pattern else text


def owner(folder: Path) -> str:
    """Return the user name of a folder's owner, or an empty text if it is not known."""
    try:
        return folder.owner()
    except (OSError, KeyError):
        return ""


@dataclass
class Place:
    """A job on the page. anchor: its HTML id, which has no job id, because a job id may contain a name."""

    participant: Participant
    cell: ClassCell
    run: ReportedRun
    anchor: str


def find_places(participants: list[Participant]) -> list[Place]:
    return [
        Place(participant, cell, run, f"job-{row}-{column}-{number}")
        for row, participant in enumerate(participants, 1)
        for column, cell in enumerate(participant.cells, 1)
        for number, run in enumerate(cell.jobs, 1)
    ]


@dataclass
class FailureGroup:
    """Failures with the same error line, apart from numbers. current: those whose cell shows them."""

    line: str
    state: State
    current: list[Place] = field(default_factory=list)
    superseded: list[Place] = field(default_factory=list)


def render_class(reader: ClassReader, participants: list[Participant], numbers: bool, refresh: int | None) -> str:
    """Return the page. refresh: seconds after which a browser loads the page again, None for a page that stays."""
    names = Names(participants, numbers)
    places = find_places(participants)
    shown = [place for place in places if place.run is place.cell.run]
    outliers = find_outliers(shown, names)
    style, policy = content_policy("page.css", "class.css")
    environment = page_environment()
    environment.filters |= {"hide": names.hide}
    return environment.get_template("class.html").render(
        policy=policy,
        generator=GENERATOR,
        style=style,
        refresh=refresh,
        written=datetime.now().strftime("%H:%M:%S"),
        participants=participants,
        names=names.shown,
        columns=len(reader.experiments),
        heads=column_heads(reader.experiments),
        states=STATES,
        counts=Counter(cell_state(cell) for each in participants for cell in each.cells),
        cell_state=cell_state,
        state_name=state_name,
        places={place.run: place for place in places},
        percent=percent,
        failing=FAILURES,
        failures=group_failures(places, names),
        outliers=outliers,
        unusual={place.run: text for (_, text), own in outliers.items() for place in own},
        slurm_answers=reader.slurm_answers,
        gpu_hours=describe_gpu_hours([each.run for each in places if each.run.has_record]) if places else "",
        own_gpu_hours={each.name: sum_gpu_hours(each.runs) for each in participants},
    )


def cell_state(cell: ClassCell) -> str:
    """Return the key of a cell's state in STATES."""
    return state_name(cell.run) or ("unreadable" if cell.problem else "")


def percent(run: ReportedRun) -> int:
    return done_percent(log_end(find_log(run.folder, run.job_id)))


def column_heads(experiments: list[str]) -> list[tuple[str, list[str]]]:
    """Group the columns by parent folder: [("ddp", ["1_gpus", "2_gpus"])]."""
    split = [experiment.rpartition("/") for experiment in experiments]
    return [(parent, [name for *_, name in group]) for parent, group in groupby(split, key=lambda parts: parts[0])]


def sum_gpu_hours(runs: list[ReportedRun]) -> float | None:
    """Return the GPU-hours of the runs whose end was recorded, None if there are none."""
    found = [hours for hours in map(ReportedRun.gpu_hours, runs) if not isinstance(hours, Missing)]
    return sum(found) if found else None


# --- failures


def failure_line(run: ReportedRun) -> str:
    """Return the error line of a failed job, otherwise what its record or its log says about its end."""
    error = "" if state_name(run) == "stopped" else last_error(log_end(find_log(run.folder, run.job_id)))
    return error or "; ".join([*run.status_notes, *run.problems]) or run.status


def group_failures(places: Iterable[Place], names: Names) -> list[FailureGroup]:
    """Group the failed jobs by error line. Failed jobs come before stopped ones, and the most frequent line first."""
    groups: dict[tuple[str, str], FailureGroup] = {}
    for place in places:
        state = state_name(place.run)
        if state not in FAILURES:
            continue
        line = names.hide(failure_line(place.run).replace(f"{place.run.folder}/", ""))
        alike = re.sub(r"\d+", "0", line)
        group = groups.setdefault((state, alike), FailureGroup(line, STATES[state]))
        (group.current if place.run is place.cell.run else group.superseded).append(place)
    ordered = sorted(groups.items(), key=lambda item: (FAILURES.index(item[0][0]), -len(item[1].current)))
    return [group for _, group in sorted(ordered, key=lambda item: not item[1].current)]


# --- runs that differ from the class


def find_outliers(places: Iterable[Place], names: Names) -> dict[tuple[str, str], list[Place]]:
    """Group the runs with settings that most runs of their experiment do not have, by experiment and settings."""
    groups: dict[tuple[str, str], list[Place]] = defaultdict(list)
    by_experiment: dict[str, list[Place]] = defaultdict(list)
    for place in places:
        if place.run.has_record:
            by_experiment[place.cell.experiment].append(place)
    for experiment, own in by_experiment.items():
        unusual = unusual_settings([place.run for place in own])
        for place, settings in zip(own, unusual, strict=True):
            if text := names.hide("; ".join([*settings, *place.run.record.overrides])):
                groups[experiment, text].append(place)
    return groups


def unusual_settings(runs: list[ReportedRun]) -> list[list[str]]:
    """Return for each run its settings that differ from those of more than half of the runs."""
    found = [traits(run) for run in runs]
    unusual: list[list[str]] = [[] for _ in runs]
    for name in dict.fromkeys(name for own in found for name in own):
        values = [own.get(name, "unset") for own in found]
        usual, number = Counter(values).most_common(1)[0]
        for texts, value in zip(unusual, values, strict=True):
            if value != usual and 2 * number > len(runs):
                texts.append(f"{facts(name).variable or name} {value}, class {usual}")
    return unusual
