"""Which rank is named when one hangs, and who says so; with real processes: tests/integration/test_hangs.py."""

import dataclasses
import os
import re
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

import errors
from parallel import joining, watchdog
from parallel.distributed import free_port
from parallel.watchdog import JOINING, Sign, Watchdog, hang_error, store_error

NODES = ("node1", "node1", "node2", "node2")


def signs(*beats: int, collectives: tuple = (), **others: Sign) -> dict[int, Sign]:
    """One per rank, two on each node. The ranks that have not begun the most collectives are in their own code."""
    begun = collectives or (40,) * len(beats)
    return {
        rank: Sign(7, NODES[rank], number, f"step {number}", begun[rank], "", "x.py:30 read")
        if begun[rank] < max(begun)
        else Sign(7, NODES[rank], number, f"step {number}", begun[rank], "gloo:all_reduce", "c10d.py:1 all_reduce")
        for rank, number in enumerate(beats)
    }


def line(found: dict[int, Sign], silent: tuple = (), world: int = 4, phase: str = "step 12") -> str:
    error = hang_error(found, set(silent), world, phase, 20)
    assert error.code == 3
    return str(error)


def test_a_rank_that_is_silent_is_named_with_its_node():
    assert line(signs(12, 12, 12, 12), silent=(3,)) == (
        "hang: no answer from rank 3 on node2, stopped or out of reach "
        "(rank 0 on node1 has waited for 20 s, step 12, in gloo:all_reduce); "
        "look at that process and its node, or raise --ddp_timeout (HANG_TIMEOUT) if it only takes long"
    )


def test_a_silent_rank_is_to_blame_also_when_others_are_behind():
    assert line(signs(12, 11, 12, 12), silent=(0, 2)).startswith(
        "hang: no answer from rank 0 on node1, rank 2 on node2, stopped or out of reach (rank 1 on node1 has "
    )


def test_a_rank_that_answers_and_has_gone_on_less_often_is_named_with_its_place():
    assert line(signs(12, 12, 11, 12)).startswith(
        "hang: no progress of rank 2 on node2 beyond step 11, in gloo:all_reduce (rank 0 on node1 has waited for 20 s, "
    )


def test_in_the_same_step_the_rank_that_has_begun_fewer_collectives_is_named_with_its_line():
    assert line(signs(12, 12, 12, 12, collectives=(39, 40, 40, 40))).startswith(
        "hang: no progress of rank 0 on node1 beyond step 12, at x.py:30 read "
        "(rank 1 on node1 has waited for 20 s, step 12, in gloo:all_reduce); "
    )


def test_ranks_that_all_wait_are_all_shown():
    found = signs(12, 12)
    found[1] = Sign(7, "node1", 12, "step 12", 40, "gloo:broadcast", "")
    assert line(found, world=2).startswith(
        "hang: no progress of any rank for 20 s "
        "(rank 0 on node1 step 12, in gloo:all_reduce, rank 1 on node1 step 12, in gloo:broadcast); "
    )


def test_a_rank_that_never_joined_is_named_with_the_node_that_it_should_be_on(monkeypatch):
    found = {0: Sign(7, "node1", 0, JOINING)}
    assert line(found, phase=JOINING, world=2) == (
        "rendezvous: rank 1 did not join within 20 s; check that node, or exclude it"
    )
    monkeypatch.setenv("ALL_NODES", "node1\nnode2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert line(found, phase=JOINING).startswith(
        "rendezvous: rank 1 on node1, rank 2 on node2, rank 3 on node2 did not join within 20 s; "
    )


def test_of_many_ranks_the_first_are_named():
    assert line({0: signs(12)[0]}, world=64).startswith(
        "hang: no answer from rank 1, rank 2, rank 3, rank 4 and 59 more, stopped or out of reach (rank 0 on "
    )


@pytest.mark.parametrize(("agent", "server"), [("True", "the torchrun"), ("", "rank 0")])
def test_a_store_that_does_not_answer_is_named_by_who_serves_it(agent, server, monkeypatch):
    for name, value in (("ADDR", "10.0.0.1"), ("PORT", "29871")):
        monkeypatch.setenv(f"MASTER_{name}", value)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
    own = signs(12, 12, 12)[2]
    assert str(store_error(own, "step 12", 20)).startswith(
        f"hang: no answer from {server} at 10.0.0.1:29871, stopped or out of reach "
        "(node2 has waited for 20 s, step 12, in gloo:all_reduce); "
    )
    assert str(store_error(own, JOINING, 8)) == (
        f"rendezvous: {server} at 10.0.0.1:29871 did not answer node2 within 8 s; check that node, or exclude it"
    )


@pytest.fixture
def of_rank(monkeypatch):
    """A Watchdog without its threads, at the end of its patience; `end` gives what it does then, in that order."""
    done: list = []

    def leave(code: int):
        done.append(code)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(watchdog.ctypes.pythonapi, "PyOS_setsig", lambda *_: done.append("TERM"))

    def make(rank: int, heard: dict[int, float], store_answered: float = 20.0, first_goes_on: bool = False) -> list:
        def sleep(seconds: float):
            done.append(seconds)
            if first_goes_on:
                dog.hear(min(heard), dataclasses.replace(dog.heard[min(heard)][0], number=8))

        monkeypatch.setattr(watchdog.time, "sleep", sleep)
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
        monkeypatch.setenv("MASTER_PORT", "29871")
        dog = Watchdog(rank, 4, hang_timeout=20, join_timeout=300)
        dog.phase, dog.now, dog.store_answered = "step 12", 20.5, store_answered
        dog.heard = {number: (signs(12, 12, 12, 12)[number], when) for number, when in heard.items()}
        dog.before_exit = lambda: done.append("record")
        dog.end()
        return done

    return make


def test_the_first_rank_that_answers_reports_at_once(of_rank, capsys):
    assert of_rank(0, {0: 20, 1: 20, 2: 20, 3: 6}) == ["record", 3]
    assert capsys.readouterr().err.startswith("error: hang: no answer from rank 3 on node2, ")


def test_the_other_ranks_leave_it_to_the_first_and_can_be_ended_meanwhile(of_rank, capsys):
    assert of_rank(1, {0: 20, 1: 20, 2: 20, 3: 6}) == ["TERM", errors.SECONDS_FOR_RANK_0, 3]
    assert capsys.readouterr().err == ""


def test_they_report_when_the_first_goes_on_without_a_word(of_rank, capsys):
    done = of_rank(1, {0: 20, 1: 20, 2: 20, 3: 6}, first_goes_on=True)
    assert done == ["TERM", errors.SECONDS_FOR_RANK_0, "record", 3]
    assert capsys.readouterr().err.startswith("error: hang: no answer from rank 3 on node2, ")


def test_without_rank_0_the_next_one_reports(of_rank, capsys):
    assert of_rank(1, {0: 6, 1: 20, 2: 20, 3: 20}) == ["record", 3]
    assert capsys.readouterr().err.startswith("error: hang: no answer from rank 0 on node1, ")


def test_without_the_store_rank_1_reports_rank_0(of_rank, capsys):
    assert of_rank(1, {0: 6, 1: 6, 2: 6, 3: 6}, store_answered=6) == ["record", 3]
    assert capsys.readouterr().err.startswith("error: hang: no answer from rank 0 at 10.0.0.1:29871, ")


def test_a_record_that_cannot_be_written_does_not_keep_the_rank(of_rank, monkeypatch):
    def full():
        raise OSError(28, "No space left on device")

    left: list = []
    dog = Watchdog(0, 2, hang_timeout=20, join_timeout=300)
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29871")
    dog.before_exit = full
    with pytest.raises(OSError, match="No space"):
        dog.end()
    assert left == [3]


class Turns:
    """Stands for `ended`: lets the judge look once for each of these seconds, so long after the time before."""

    def __init__(self, monkeypatch, *seconds: float):
        self.seconds = iter(seconds)
        self.now = 1000.0
        monkeypatch.setattr(watchdog.time, "monotonic", lambda: self.now)

    def wait(self, interval: float) -> bool:
        step = next(self.seconds, None)
        self.now += step or 0.0
        return step is None


def test_the_judge_ends_a_rank_that_has_not_gone_on_for_so_long(monkeypatch):
    dog = Watchdog(0, 2, hang_timeout=20, join_timeout=300)
    ends: list = []
    monkeypatch.setattr(dog, "end", lambda: ends.append(dog.now))
    dog.phase = "step 12"
    monkeypatch.setattr(dog, "ended", Turns(monkeypatch, *[1.0] * 22))
    dog.judge()
    assert ends == [21, 22]
    ends.clear()
    dog.beats, dog.phase = 1, JOINING
    dog.judge()
    assert not ends, "joining has its own limit"


def test_a_job_that_was_suspended_as_a_whole_is_not_hung(monkeypatch):
    dog = Watchdog(0, 2, hang_timeout=20, join_timeout=300)
    dog.phase = "step 12"
    monkeypatch.setattr(dog, "end", lambda: pytest.fail("it is not hung"))
    monkeypatch.setattr(dog, "ended", Turns(monkeypatch, 1.0, 1.0, 3600.0, 1.0))
    dog.judge()
    assert dog.now == 5


@pytest.fixture
def store():
    return dist.TCPStore(
        "127.0.0.1", free_port(), is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )


def test_messengers_read_only_when_they_are_suspicious(store, monkeypatch):
    pair = [Watchdog(rank, 2, hang_timeout=20, join_timeout=300) for rank in range(2)]
    for dog in pair:
        dog.phase, dog.beats = "step 12", 12
        dog.exchange(store, number=1)
        assert not dog.heard
    pair[1].now = pair[0].now = 6.0  # more than a quarter of the time-out
    monkeypatch.setattr(watchdog, "collectives", lambda: (40, "gloo:all_reduce"))
    pair[0].exchange(store, number=2)
    assert {rank: (sign.number, sign.beats) for rank, (sign, _) in pair[0].heard.items()} == {0: (2, 12), 1: (1, 12)}
    assert pair[0].store_answered == 6.0
    pair[0].now = 9.0
    pair[0].exchange(store, number=3)
    assert pair[0].heard[1][1] == 6.0, "an old sign stays old"
    pair[1].exchange(store, number=2)
    pair[0].exchange(store, number=4)
    sign, when = pair[0].heard[1]
    assert (sign.number, sign.collectives, sign.waits_in, when) == (2, 40, "gloo:all_reduce", 9.0)
    assert re.fullmatch(r"\w+\.py:\d+ \w+", sign.at)


def test_a_world_of_one_has_no_watchdog_but_groups_that_outlast_the_flag(monkeypatch):
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        monkeypatch.setattr(distributed_c10d, name, None)
    monkeypatch.setenv("JOIN_TIMEOUT", "100")
    assert watchdog.start(1800) == 1860
    assert watchdog.current is None
    assert distributed_c10d.default_pg_timeout == distributed_c10d.default_pg_nccl_timeout == timedelta(seconds=1860)
    assert watchdog.start(20) == 160, "or the group would end while its ranks still join"


# joining.py


@pytest.fixture
def rank_1_of_2(monkeypatch):
    given = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in (given | {"JOIN_TIMEOUT": "0"}).items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("MASTER_PORT", "abc", "'abc' is no port"),
        ("MASTER_PORT", "0", "'0' is no port"),
        ("MASTER_PORT", "70000", "'70000' is no port"),
        ("MASTER_PORT", "-1", "'-1' is no port"),
        ("MASTER_PORT", "", "is not set, and there are several ranks"),
        ("MASTER_ADDR", "", "is not set, and there are several ranks"),
    ],
)
def test_an_address_that_cannot_be_is_refused(name, value, what, rank_1_of_2, monkeypatch, refusal):
    monkeypatch.setenv(name, value)
    assert refusal(watchdog.start, 20).startswith(f"error: {name}: {what}; give ")


def test_rank_0_that_is_not_reached_is_named_after_the_time_out(rank_1_of_2, monkeypatch, refusal):
    slept: list = []
    monkeypatch.setattr(joining.time, "sleep", slept.append)
    address = f"127.0.0.1:{os.environ['MASTER_PORT']}"
    line = refusal(watchdog.start, 20, code=3)
    assert line.startswith(f"error: MASTER_ADDR: {joining.node_name()} cannot reach {address} ([Errno 111] ")
    assert "within 0 s; check name resolution and firewall" in line
    monkeypatch.setenv("MASTER_ADDR", "no-such-node.invalid")
    assert "cannot reach no-such-node.invalid:" in refusal(watchdog.start, 20, code=3)


def test_rank_0_that_cannot_open_the_store_says_so_at_once(rank_1_of_2, monkeypatch, refusal):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")  # of nobody, RFC 5737
    assert " cannot listen at 192.0.2.1:" in refusal(watchdog.start, 20, code=3)


def test_under_torchrun_rank_0_is_a_client_as_well(rank_1_of_2, monkeypatch, refusal):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert " cannot reach 127.0.0.1:" in refusal(watchdog.start, 20, code=3)
