"""Which rank is named when one hangs, and who says so; with real processes: tests/integration/test_hangs.py."""

import os
import re
from datetime import timedelta

import pytest
from torch.distributed import distributed_c10d

from parallel import joining, watchdog
from parallel.distributed import free_port
from parallel.watchdog import Sign, Watchdog, hang_error


@pytest.fixture(autouse=True)
def rank_0_of_4(monkeypatch):
    given = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (given | {"MASTER_PORT": str(free_port()), "JOIN_TIMEOUT": "0"}).items():
        monkeypatch.setenv(name, value)


def sign(rank: int, number: int = 20, beats: int = 12, collectives: int = 40) -> Sign:
    """Of one of four ranks, two on each node."""
    return Sign(number, f"node{1 + rank // 2}", [beats, collectives], f"step {beats}, at x.py:{collectives} read")


def line(*later: Sign, silent: tuple = ()) -> str:
    """What rank 0 says of these ranks; those that are not silent have counted on since it read them before."""
    signs = dict(enumerate(later))
    earlier = {rank: each if rank in silent else each._replace(number=15) for rank, each in signs.items()}
    error = hang_error(0, earlier, signs, 20)
    assert error.code == 3
    return str(error).removesuffix(f"; {watchdog.WAY_OUT}")


NOTICED = "noticed by rank 0 on node1 (step 12, at x.py:40 read) after 20 s"


def test_a_rank_that_is_silent_is_named_with_its_node_also_when_others_are_behind():
    behind = sign(1, beats=11)
    last = "rank 3 on node2 (last heard: step 12, at x.py:40 read)"
    assert line(sign(0), behind, sign(2), sign(3), silent=(3,)) == (
        f"hang: no answer from {last}, stopped or out of reach, {NOTICED}"
    )


def test_a_rank_that_has_gone_on_less_often_is_named_with_its_place():
    behind = sign(2, beats=11)
    assert line(sign(0), sign(1), behind, sign(3)) == (
        f"hang: no progress of rank 2 on node2 (step 11, at x.py:40 read), {NOTICED}"
    )


def test_in_one_step_the_ranks_that_have_begun_fewer_collectives_are_named():
    found = [sign(0), sign(1, collectives=39), sign(2, collectives=39), sign(3)]
    assert line(*found) == (
        "hang: no progress of rank 1 on node1 (step 12, at x.py:39 read), rank 2 on node2 (step 12, at x.py:39 read), "
        + NOTICED
    )


def test_nobody_else_is_blamed_by_a_rank_whose_own_file_cannot_be_written():
    assert line(sign(0), silent=(0,)) == f"hang: no progress of rank 0 on node1 (step 12, at x.py:40 read), {NOTICED}"


def test_ranks_that_never_came_are_named_with_the_nodes_that_they_should_be_on(monkeypatch):
    joined = sign(0, beats=0)
    assert line(joined) == (
        "rendezvous: rank 1, rank 2, rank 3 did not join within 20 s; check that node, or exclude it"
    )
    monkeypatch.setenv("ALL_NODES", "node1\nnode2")
    assert line(joined, sign(1, beats=0)).startswith("rendezvous: rank 2 on node2, rank 3 on node2 did not join ")


def test_a_rank_that_still_joins_is_named_and_not_those_that_write_less_often():
    found = [sign(0, beats=0), sign(1, beats=3), sign(2, beats=3), sign(3, beats=3)]
    assert line(*found, silent=(1, 2, 3)).startswith("hang: no progress of rank 0 on node1 (step 0, at x.py:40 read), ")


def test_of_many_ranks_the_first_are_named(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "64")
    assert line(sign(0)).startswith("hang: no answer from rank 1, rank 2, rank 3, rank 4 and 59 more, stopped or ")


class Intervals:
    """Stands for `ended`: so many intervals pass, however long each of them takes."""

    def __init__(self, number: int):
        self.left = number

    def wait(self, seconds: float) -> bool:
        self.left -= 1
        return self.left < 0


def test_a_rank_ends_after_so_many_intervals_without_a_beat(monkeypatch):
    """Not by a clock: a job that was suspended as a whole is not hung."""
    ends = []
    monkeypatch.setattr(Watchdog, "end", lambda dog, earlier: ends.append((dog.now, earlier[0].number)))
    dog = Watchdog(hang_timeout=20)
    monkeypatch.setattr(watchdog, "current", dog)
    watchdog.beat("step 12")
    dog.ended = Intervals(20)
    dog.run()
    assert ends == []
    dog.ended = Intervals(1)
    watchdog.beat("step 13")
    dog.run()
    assert ends == []
    dog.ended = Intervals(20)
    dog.run()
    assert ends == [(41, 35)]


def test_ranks_read_each_others_files_and_one_of_them_reports(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    left = []
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr(watchdog.time, "sleep", left.append)
    first = Watchdog(hang_timeout=20)
    monkeypatch.setenv("RANK", "1")
    second = Watchdog(hang_timeout=20)
    first.beats = second.beats = 1
    second.write()
    first.write()
    earlier = first.read_signs()
    first.write()
    first.before_exit = lambda: left.append("record")
    second.before_exit = lambda: left.append("record, again")
    monkeypatch.setenv("RANK", "0")
    first.end(earlier)
    second.end(earlier)
    assert left == ["record", 3, 10, 3]
    host = re.escape(joining.node_name())
    assert re.fullmatch(rf"error: hang: no answer from rank 1 on {host} \(last heard: .*\n", capsys.readouterr().err)
    assert list((tmp_path / "run").iterdir()) == []


def test_a_file_that_cannot_be_written_ends_nothing(monkeypatch, tmp_path, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("RUN_DIR", str(tmp_path / "file"))
    left = []
    monkeypatch.setattr(os, "_exit", left.append)
    dog = Watchdog(hang_timeout=20)
    dog.beats = 1
    dog.write()
    dog.end(dog.read_signs())
    assert left == [3]
    assert capsys.readouterr().err.startswith("error: hang: no progress of rank 0 on ")


def test_a_world_of_one_has_no_watchdog_but_groups_that_outlast_the_flag(monkeypatch):
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        monkeypatch.setattr(distributed_c10d, name, None)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("JOIN_TIMEOUT", "100")
    assert watchdog.start(1800) == 1860
    assert watchdog.current is None
    assert distributed_c10d.default_pg_timeout == distributed_c10d.default_pg_nccl_timeout == timedelta(seconds=1860)
    assert watchdog.start(20) == 160, "or the group would end while its ranks still join"


# joining.py


@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT"])
def test_an_address_that_is_missing_is_named(name, monkeypatch, refusal):
    monkeypatch.delenv(name)
    assert refusal(watchdog.start, 20) == (
        f"error: {name}: is not set, and there are several ranks; give rank 0's address and a port"
    )
