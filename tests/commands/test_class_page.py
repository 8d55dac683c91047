"""Tests of the class at a glance: states, failures, outliers, names, the command line, and the page in a browser."""

import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest

from class_files import NO_MEMORY, START, MadeUpClass, add_job, make_class
from helpers import REPOSITORY, until
from report_files import add_run, write
from reporting import classroom_runs
from reporting.classroom_page import Names, cell_state, find_places, group_failures, render_class
from reporting.classroom_plan import ClassPlan
from reporting.classroom_runs import ClassReader

EXPERIMENTS = ["baseline", "ddp/1_gpus", "ddp/2_gpus", "deepspeed-single-gpu/zero_1", "deepspeed-single-gpu/zero_2"]
LATER = START + timedelta(hours=1)


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Set the answer of squeue: lines with id, state, reason and folder."""

    def answer(*lines: str) -> None:
        folder = MadeUpClass(queue=list(lines)).install_squeue(tmp_path / "slurm")
        monkeypatch.setenv("PATH", f"{folder}:{path}")

    path = os.environ["PATH"]
    answer()
    return answer


def states(reader: ClassReader) -> list[str]:
    (participant,) = reader.read()
    return [cell_state(cell) for cell in participant.cells]


def page_of(reader: ClassReader, numbers: bool = False) -> str:
    return render_class(reader, reader.read(), numbers, None)


def section(page: str, name: str) -> str:
    """Return the text of a section."""
    part = page.partition(f'<section id="{name}">')[2].partition("</section>")[0]
    return " ".join(re.sub(r"<wbr>|<[^>]*>", lambda match: "" if match[0] == "<wbr>" else " ", part).split())


@pytest.mark.promise("the class at a glance shows each state and each failure")
def test_every_state(tmp_path, slurm):
    """Slurm names the real folder. The instructor gives a link to it."""
    clone, link = tmp_path / "clone", tmp_path / "alice"
    link.symlink_to(clone)
    more = ("oom", "stopped", "timeout", "vanished", "restarted", "none", "file")
    experiments = [*EXPERIMENTS, *(f"x/{name}" for name in more)]
    add_job(clone, experiments[0], "1", START, "completed")
    add_job(clone, experiments[1], "2", START, "running", percent=50)
    add_job(clone, experiments[2], "3", START, "refused", error="error: x: is wrong; correct it")
    zero_1 = clone / "experiments" / experiments[3]
    write(zero_1 / "log" / "z_4.out", "job 4 of this folder\n")  # it has begun, and has no record yet
    for number, state in enumerate(("oom", "stopped", "timeout"), 6):
        add_job(clone, f"x/{state}", str(number), START, state)
    add_job(clone, "x/vanished", "9", START, "running")
    add_job(clone, "x/restarted", "10", START, "stopped")  # it waits, although it has a record
    write(clone / "experiments/x/file/results", "not a folder")
    place = f"{clone}/experiments"
    slurm(
        f"2|RUNNING|None|{place}/ddp/1_gpus",
        f"4|RUNNING|None|{zero_1}",
        f"5|PENDING|Resources|{place}/{experiments[4]}",
        f"10|PENDING|BeginTime|{place}/x/restarted",
        "99|PENDING|Priority|/somewhere/else",
    )
    reader = ClassReader([link / "experiments"], experiments)
    expected = ["completed", "running", "failed", "running", "waiting", "oom", "stopped", "stopped", "failed"]
    assert states(reader) == [*expected, "waiting", "", "unreadable"]
    page = page_of(reader)
    assert 'R</abbr> 47 %<progress max="100" value="47">' in page
    assert 'R</abbr> 0 %<progress max="100" value="0">' in page
    assert '<td class="waiting" title="Resources">' in page
    assert '<td class="unreadable" title="results: Not a directory">' in page
    assert "error: x: is wrong; correct it alice ddp/2_gpus, job 3" in section(page, "failures")


def test_a_run_without_slurm_runs_while_it_holds_its_lock(tmp_path, slurm):
    folder = tmp_path / "alice" / "experiments" / "baseline"
    write(folder / "log" / "baseline_local-1.out", "job local-1 of this folder\n")
    (folder / "results" / ".local-1").mkdir(parents=True)
    reader = ClassReader([tmp_path / "alice"], ["baseline"])
    descriptor = os.open(folder / "results" / ".local-1", os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        assert states(reader) == ["running"]
    finally:
        os.close(descriptor)
    assert states(reader) == ["failed"]


@pytest.mark.parametrize(
    ("older", "newer", "state", "small"),
    [
        ("failed", "completed", "completed", None),
        ("completed", "failed", "completed", "F"),
        ("completed", "running", "completed", "R"),
        ("failed", "running", "running", None),
        ("oom", "failed", "failed", None),
    ],
)
def test_a_completed_run_stays_done_and_otherwise_the_newest_decides(tmp_path, slurm, older, newer, state, small):
    add_job(tmp_path / "alice", "baseline", "10", START, older)
    folder = add_job(tmp_path / "alice", "baseline", "11", LATER, newer)
    slurm(f"11|RUNNING|None|{folder}" if newer == "running" else "")
    reader = ClassReader([tmp_path / "alice"], ["baseline"])
    assert states(reader) == [state]
    found = re.search(r'<small class="newer">.*?<abbr[^>]*>(.)</abbr>', page_of(reader))
    assert (found and found[1]) == small
    failures = section(page_of(reader), "failures")
    assert ("(has a newer or completed job)" in failures) == (
        (older != "completed" and newer != older) or (newer == "failed" and older == "completed")
    )


def test_without_an_answer_of_slurm_the_page_says_so(tmp_path, slurm):
    add_job(tmp_path / "alice", "baseline", "10", START, "running")
    reader = ClassReader([tmp_path / "alice"], ["baseline"])
    assert "Slurm does not answer" not in page_of(reader)
    write(tmp_path / "slurm" / "bin" / "squeue", "#!/bin/sh\nexit 1\n")
    assert states(reader) == ["running"], "nobody knows that it has ended"
    assert "Slurm does not answer" in page_of(reader)


def test_a_refresh_reads_only_folders_that_have_changed(tmp_path, slurm, monkeypatch):
    read = []
    find = classroom_runs.find_runs_in_folder
    monkeypatch.setattr(
        classroom_runs, "find_runs_in_folder", lambda folder, **o: read.append(folder) or find(folder, **o)
    )
    done = add_job(tmp_path / "alice", "baseline", "10", START, "completed")
    running = add_job(tmp_path / "alice", "ddp/1_gpus", "11", START, "running", percent=20)
    slurm(f"11|RUNNING|None|{running}")
    before = time.time() - 3600
    for folder in (done, running):
        for name in ("results", "log"):
            os.utime(folder / name, (before, before))
    reader = ClassReader([tmp_path / "alice"], ["baseline", "ddp/1_gpus", "ddp/2_gpus"])
    assert states(reader) == ["completed", "running", ""]
    assert read == [done, running]
    read.clear()
    assert states(reader) == ["completed", "running", ""]
    assert read == [running]
    add_job(tmp_path / "alice", "baseline", "12", LATER, "failed")  # changes the folder's time
    assert [cell.newer.job_id for cell in reader.read()[0].cells if cell.newer] == ["12"]


def test_failures_with_the_same_line_are_one_group(tmp_path, slurm):
    clones = [tmp_path / name / "workshop" for name in ("alice", "bob", "carol")]
    for number, clone in enumerate(clones):
        error = f"error: {clone}/x.json: line {number} is wrong; correct it"
        add_job(clone, "baseline", str(10 + number), START, "refused", error=error)
    add_job(clones[0], "ddp/1_gpus", "20", START, "oom", error=NO_MEMORY)
    add_job(clones[1], "ddp/1_gpus", "21", START, "failed", error="error: <script>alert(1)</script>")
    reader = ClassReader(clones, EXPERIMENTS)
    participants = reader.read()
    groups = group_failures(find_places(participants), Names(participants, numbers=False))
    assert [(group.line, len(group.current)) for group in groups] == [
        ("error: x.json: line 0 is wrong; correct it", 3),
        ("error: <script>alert(1)</script>", 1),
        (NO_MEMORY, 1),
    ]
    page = page_of(reader)
    assert "<script" not in page and "&lt;script&gt;" in page
    links = set(re.findall(r'href="#([^"]*)"', page))
    assert len(links) == 5 and links <= set(re.findall(r'id="([^"]*)"', page))


def test_a_run_whose_settings_differ_from_the_class_is_marked_and_named(tmp_path, slurm):
    clones = [tmp_path / f"person{i}" / "workshop" for i in range(4)]
    for number, clone in enumerate(clones):
        batch = 8 if number == 2 else 4
        add_job(clone, "baseline", str(number), START, "completed", per_device_train_batch_size=batch)
    page = page_of(ClassReader(clones, ["baseline", "ddp/1_gpus"]))
    assert "baseline: BATCH_SIZE 8, class 4 person2 , job 2 " in section(page, "differs")
    (mark,) = re.findall(r'class="mark" href="#([^"]*)" title="BATCH_SIZE 8, class 4"', page)
    assert f'<li id="{mark}"><b>person2</b>' in page
    page = page_of(ClassReader(clones[1:3], ["baseline"]))
    assert "All runs of an experiment have the same settings" in page, "two runs that differ have no majority"


@pytest.mark.promise("--numbers shows no name")
def test_numbers_hide_all_names(tmp_path, slurm):
    people = ["alice", "Bob-Smith", "carol"]
    clones = [tmp_path / "home" / name / "workshop" for name in people]
    for number, clone in enumerate(clones[:2]):
        other = people[1 - number]
        error = f"error: /scratch/{people[number]}/x.json: is not that of {other.upper()}; ask {clone}/README.md"
        add_job(clone, "baseline", str(number), START, "failed", error=error, dataset=f"/data/{people[number]}.json")
        add_job(clone, "ddp/1_gpus", f"1{number}", START, "running", dataset=f"/data/{people[0]}.json")
    write(clones[1] / "experiments" / "ddp" / "2_gpus" / "log", "not a folder")
    write(clones[2] / "experiments/baseline/log/baseline_carol-1.out", "error: x: is wrong; correct it\n")
    reader = ClassReader(clones, EXPERIMENTS)
    page = page_of(reader, numbers=True)
    assert not [name for name in people if name.lower() in page.lower()]
    assert re.findall(r'<th scope="row">(.*?)</th>', page) == ["1", "2", "3"]
    assert "error: /scratch/1/x.json: is not that of 2; ask README.md" in section(page, "failures")
    assert re.findall(r'<th scope="row">(.*?)</th>', page_of(reader)) == people


def test_an_unreadable_folder_is_a_row(tmp_path, slurm, command):
    write(tmp_path / "bob" / "experiments", "not a folder")
    (tmp_path / "carol").mkdir()
    add_run(tmp_path / "alice", "baseline", "1", configs=None)
    folders = [tmp_path / name for name in ("alice", "bob", "carol", "dora")]
    run = command("report.py", "--class", *folders, PATH=os.environ["PATH"])
    assert (run.code, run.out) == (0, "4 participants, 1 job: report/class.html\n"), run.err
    page = (run.folder / "report" / "class.html").read_text()
    assert re.findall(r"unreadable: ([^<]*)<", page) == [
        "Not a directory",
        "it holds no folder experiments",
        "there is no such folder",
    ]
    assert "http-equiv" in page and 'http-equiv="refresh"' not in page
    run = command("report.py", "--class", *folders[1:], PATH=os.environ["PATH"])
    assert (run.code, run.error) == (
        2,
        f"{folders[1]}: Not a directory; no folder can be read; give clones of the workshop",
    )


def test_the_report_and_the_class_share_a_folder(tmp_path, command):
    add_run(tmp_path / "alice", "baseline", "1", configs=None)
    for arguments in (["--class", tmp_path / "alice"], [tmp_path / "alice"], ["--class", tmp_path / "alice"]):
        run = command("report.py", *arguments)
        assert run.code == 0, run.err
    assert sorted(path.name for path in (run.folder / "report").glob("*.html")) == ["class.html", "index.html"]
    (run.folder / "report" / "class.html").write_text("my own page")
    assert command("report.py", "--class", tmp_path / "alice").error == (
        "report/class.html: is not a page of this program; give another folder with -o"
    )


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--class", "a", "--job", "1"], "--job: cannot be used with --class, "),
        (["--class", "a", "--reference", "b"], "--reference: cannot be used with --class, "),
        (["--class", "a", "--all-runs"], "--all-runs: cannot be used with --class, "),
        (["b", "--class", "a"], "FOLDER: cannot be used with --class, "),
        (["--job", "1", "--reference", "b"], "--reference: cannot be used with --job, "),
        (["--people", "20", "--job", "1"], "--job: cannot be used with --people, "),
        (["--watch"], "--watch: changes only the output of --class; "),
        (["--gpus", "8"], "--gpus: changes only the output of --people; "),
        (["--class", "a", "--experiments", "ddpp"], "--experiments: ddpp holds no experiment; "),
    ],
)
def test_flags_that_do_not_go_together(command, arguments, error):
    run = command("report.py", *arguments)
    assert run.code == 2 and run.error.startswith(error)


def test_watch_rewrites_the_page_until_ctrl_c(tmp_path, slurm):
    clone = tmp_path / "alice"
    add_run(clone, "baseline", "1", configs=None)
    page = tmp_path / "report" / "class.html"
    words = [sys.executable, REPOSITORY / "scripts/report.py", "--class", clone, "-o", page.parent, "--watch"]
    process = subprocess.Popen(list(map(str, words)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until(page.exists, ended=lambda: process.poll() is not None)
        first = page.read_text()
        assert '<meta http-equiv="refresh" content="10">' in first and "done <b>1</b>" in first
        add_run(clone, "ddp/1_gpus", "2", configs=None)
        until(lambda: "done <b>2</b>" in page.read_text(), ended=lambda: process.poll() is not None)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert (process.returncode, err) == (0, "")
    assert out.splitlines()[0] == f"{page}: rewritten every 10 seconds; Ctrl-C ends this"
    assert out.splitlines()[-1] == f"1 participant, 2 jobs: {page}"
    assert "refresh" not in page.read_text() and "done <b>2</b>" in page.read_text()
    assert [path.name for path in page.parent.iterdir()] == ["class.html"]


@pytest.fixture(scope="module")
def class_page(tmp_path_factory) -> Path:
    """The page of a class of 20 with runs in all states."""
    top = tmp_path_factory.mktemp("class")
    columns = ClassPlan().experiments(shared=False)
    made = make_class(top, columns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{made.install_squeue(top)}:{os.environ['PATH']}")
        html = page_of(ClassReader(made.folders, columns))
    write(top / "class.html", html)
    return top / "class.html"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_page_in_a_browser(class_page, page, width, scheme):
    page.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    page.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    page.visit(class_page.as_uri())
    legend = page.evaluate("[...document.querySelectorAll('.legend li')].map((each) => each.innerText)")
    counts = dict(re.findall(r"\S (.*) (\d+)", "\n".join(legend)))
    assert len(counts) == 7 and all(map(int, counts.values())), legend
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    # One row per participant and one row for the missing clone; each cell is as high as one line
    assert page.evaluate("document.querySelectorAll('.grid tbody tr').length") == 20
    heights = page.evaluate("[...document.querySelectorAll('.grid td')].map((each) => each.offsetHeight)")
    assert max(heights) < 50
    assert page.evaluate("document.querySelector('.grid').getBoundingClientRect().top") < 400
    # On a phone the grid scrolls in its box, and the names stay in sight
    box = "document.querySelector('.wide')"
    assert page.evaluate(f"{box}.scrollWidth > {box}.clientWidth") == (width == 390)
    page.evaluate(f"{box}.scrollLeft = 300")
    name = page.evaluate("document.querySelector('.grid tbody th').getBoundingClientRect().left")
    assert 0 <= name < 40
    colours = page.evaluate(
        "Object.fromEntries(['waiting','running','done','failed','oom','stopped'].map((name) => "
        "[name, getComputedStyle(document.querySelector(`td.${name}`)).backgroundColor]))"
    )
    assert len(set(colours.values())) == 6
    low = [each for each in page.contrasts("main *, header *") if each[0] < 4.5]
    assert low == []
    assert (
        page.evaluate("performance.getEntriesByType('resource').filter((e) => !e.name.startsWith('data:')).length") == 0
    )
    # A click on a failure shows its error line
    page.tab_to("td.failed a")
    page.enter()
    target = "document.querySelector('li:target')"
    until(lambda: page.evaluate(f"{target} !== null"))
    assert page.evaluate(f"{target}.closest('.group').querySelector('code').innerText").startswith("error: ")
    assert page.evaluate(f"getComputedStyle({target}).backgroundColor") != "rgba(0, 0, 0, 0)"
