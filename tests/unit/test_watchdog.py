"""Tests of the rank that is named when a job hangs. tests/integration/test_hangs.py uses real processes."""

import json
import signal
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import distributed_c10d

from distributed import watchdog
from distributed.watchdog import Heartbeat, Watchdog, hang_error
from helpers import free_port


@pytest.fixture(autouse=True)
def rank_0_of_4(monkeypatch):
    given = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (given | {"MASTER_PORT": str(free_port()), "JOIN_TIMEOUT": "0"}).items():
        monkeypatch.setenv(name, value)


def sign(rank: int, number: int = 20, beats: int = 12, collectives: int = 40) -> Heartbeat:
    """Return the sign of life of one of four ranks, with two ranks on each node."""
    return Heartbeat(number, f"node{1 + rank // 2}", [beats, collectives], f"step {beats}, at x.py:{collectives} read")


def line(*later: Heartbeat, silent: tuple = ()) -> str:
    """Return the error of rank 0 for these signs of life. Only the silent ranks have not increased their numbers."""
    signs = dict(enumerate(later))
    earlier = {rank: each if rank in silent else each._replace(number=15) for rank, each in signs.items()}
    error = hang_error(0, earlier, signs, 20)
    assert error.code == 3
    return str(error).removesuffix(f"; {watchdog.WAY_OUT}")


NAMED = {  # signs of life, silent ranks, error
    "a silent rank, although another is late": (
        [sign(0), sign(1, beats=11), sign(2), sign(3)],
        (3,),
        "hang: no answer from rank 3 on node2 (last heard: step 12, at x.py:40 read), stopped or out of reach, "
        "noticed by rank 0 on node1 (step 12, at x.py:40 read) after 20 s",
    ),
    "less progress": (
        [sign(0), sign(1), sign(2, beats=11), sign(3)],
        (),
        "hang: no progress of rank 2 on node2 (step 11, at x.py:40 read), "
        "noticed by rank 0 on node1 (step 12, at x.py:40 read) after 20 s",
    ),
    "fewer collectives in one step": (
        [sign(0), sign(1, collectives=39), sign(2, collectives=39), sign(3)],
        (),
        "hang: no progress of rank 1 on node1 (step 12, at x.py:39 read), rank 2 on node2 (step 12, at x.py:39 read), "
        "noticed by rank 0 on node1 (step 12, at x.py:40 read) after 20 s",
    ),
    "never joined": (
        [sign(0, beats=0), sign(1, beats=0)],
        (),
        "rendezvous: rank 2 on node2, rank 3 on node2 did not join within 20 s; check that node, or exclude it",
    ),
    "still joining, while the others are silent": (
        [sign(0, beats=0), sign(1, beats=3), sign(2, beats=3), sign(3, beats=3)],
        (1, 2, 3),
        "hang: no progress of rank 0 on node1 (step 0, at x.py:40 read), "
        "noticed by rank 0 on node1 (step 0, at x.py:40 read) after 20 s",
    ),
}


@pytest.mark.parametrize(("signs", "silent", "error"), NAMED.values(), ids=NAMED)
def test_the_error_names_the_rank_that_the_others_wait_for(signs, silent, error, monkeypatch):
    monkeypatch.setenv("ALL_NODES", "node1\nnode2")
    assert line(*signs, silent=silent) == error


def test_process_groups_time_out_after_the_watchdog(monkeypatch):
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        monkeypatch.setattr(distributed_c10d, name, None)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("JOIN_TIMEOUT", "100")
    assert watchdog.start(20) == 160, "otherwise the group would time out while its ranks still join"
    assert watchdog.start(1800) == 1860
    assert distributed_c10d.default_pg_timeout == distributed_c10d.default_pg_nccl_timeout == timedelta(seconds=1860)


def test_a_missing_address_is_named(monkeypatch, refusal):
    monkeypatch.delenv("MASTER_PORT")
    expected = "error: MASTER_PORT: is not set, and there are several ranks; give rank 0's address and a port"
    assert refusal(watchdog.start, 20) == expected


# Flight records

RECORD = {"entries": [{"profiling_name": "gloo:all_reduce"}]}


@pytest.fixture
def rank_0(monkeypatch, tmp_path) -> Watchdog:
    """The watchdog of rank 0 of job 4711, which has opened its process group. Its thread does not run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JOB_ID", "4711")
    monkeypatch.setattr(distributed_c10d, "is_initialized", lambda: True)
    monkeypatch.setattr(watchdog, "last_collectives", lambda: RECORD)
    own = Watchdog(20)
    monkeypatch.setattr(own, "own_heartbeat", lambda: sign(0))
    own.write()
    return own


def end(rank_0: Watchdog, monkeypatch) -> list[str]:
    """Let rank 0 notice a hang in which rank 3 does not answer. Return the flight records at the end of the process.

    Ranks 1 and 2 write theirs while rank 0 waits, one each time that it looks.
    """
    late = iter((1, 2))
    signs = {rank: sign(rank) for rank in range(4)}
    monkeypatch.setattr(rank_0, "read_heartbeats", lambda: signs)

    def sleep(seconds: float) -> None:
        if rank := next(late, None):
            rank_0.flight_records.mkdir(parents=True, exist_ok=True)
            rank_0.flight_record(rank).write_text("{}")

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(watchdog.time, "sleep", sleep)
    monkeypatch.setattr(watchdog.os, "_exit", leave)
    with pytest.raises(SystemExit, match="3"):
        rank_0.end({rank: each._replace(number=each.number - (rank < 3)) for rank, each in signs.items()})
    return sorted(path.name for path in Path("results").glob("4711_flight_record/*"))


def test_the_reporting_rank_waits_for_the_flight_records_of_the_ranks_that_answer(rank_0, monkeypatch, capsys):
    assert end(rank_0, monkeypatch) == ["rank_0.json", "rank_1.json", "rank_2.json"]
    assert "; the last collectives of the ranks are in results/4711_flight_record\n" in capsys.readouterr().err
    assert json.loads(Path("results/4711_flight_record/rank_0.json").read_text()) == RECORD


@pytest.mark.promise("when a run hangs, each rank that still runs leaves its last collectives")
def test_a_rank_leaves_its_flight_record_when_another_rank_reports(rank_0, monkeypatch, capsys):
    rank_0.folder.rename(rank_0.folder.with_name("moved"))
    rank_0.write()
    assert json.loads(rank_0.flight_record().read_text()) == RECORD, "it need not have reached its own limit"
    rank_0.flight_record().unlink()
    assert "rank_0.json" in end(rank_0, monkeypatch)
    assert not capsys.readouterr().err


def test_a_full_disk_does_not_prevent_the_end(rank_0, monkeypatch, capsys):
    rank_0.flight_records.write_text("the folder cannot be created")
    waited: list[set[int]] = []
    monkeypatch.setattr(rank_0, "wait_for_flight_records", waited.append)
    assert end(rank_0, monkeypatch) == []
    assert waited == [{1, 2}], "this rank still gives the other ranks time, because their disks may have room"
    assert capsys.readouterr().err.startswith("error: hang: no answer from rank 3 ")


def test_a_recorder_that_fails_does_not_prevent_the_end(rank_0, monkeypatch, capsys):
    """PyTorch's recorder raises after an error of the GPU. An alarm that was left would kill the process later."""

    def fail() -> dict:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(watchdog, "last_collectives", fail)
    assert end(rank_0, monkeypatch) == ["rank_1.json", "rank_2.json"]
    assert signal.alarm(0) == 0


def test_collectives_of_both_backends_are_recorded(monkeypatch):
    """With CPU offload, FSDP uses NCCL and gloo."""
    for name, collective in (("_dump_nccl_trace_json", "nccl:all_gather"), ("_dump_fr_trace_json", "gloo:all_reduce")):
        text = json.dumps({"version": "2.10", "entries": [{"profiling_name": collective}]})
        monkeypatch.setattr(watchdog._distributed_c10d, name, lambda text=text: text, raising=False)
    entries = watchdog.last_collectives()["entries"]
    assert [entry["profiling_name"] for entry in entries] == ["nccl:all_gather", "gloo:all_reduce"]


def test_a_hang_without_a_process_group_names_no_folder(rank_0, monkeypatch, capsys):
    monkeypatch.setattr(distributed_c10d, "is_initialized", lambda: False)
    assert end(rank_0, monkeypatch) == []
    assert capsys.readouterr().err.endswith(f"; {watchdog.WAY_OUT}\n")


def test_a_rank_looks_often_near_its_limit(rank_0, monkeypatch):
    monkeypatch.setattr(rank_0, "limit", 1800)
    monkeypatch.setattr(rank_0, "hang_timeout", 1800)
    monkeypatch.setattr(rank_0, "phases_started", 1)
    assert rank_0.interval() == 90
    rank_0.now = 1350
    assert rank_0.interval() == 5, "another rank that reports waits only 10 seconds for this rank"
