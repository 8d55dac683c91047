"""Tests of the rank that is named when a job hangs. tests/integration/test_hangs.py uses real processes."""

from datetime import timedelta

import pytest
from torch.distributed import distributed_c10d

from distributed import watchdog
from distributed.watchdog import Heartbeat, hang_error
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


NOTICED = "noticed by rank 0 on node1 (step 12, at x.py:40 read) after 20 s"


def test_a_silent_rank_is_named_even_if_another_is_late():
    last = "rank 3 on node2 (last heard: step 12, at x.py:40 read)"
    assert line(sign(0), sign(1, beats=11), sign(2), sign(3), silent=(3,)) == (
        f"hang: no answer from {last}, stopped or out of reach, {NOTICED}"
    )


def test_a_rank_with_less_progress_is_named_with_its_place():
    assert line(sign(0), sign(1), sign(2, beats=11), sign(3)) == (
        f"hang: no progress of rank 2 on node2 (step 11, at x.py:40 read), {NOTICED}"
    )


def test_in_one_step_the_ranks_with_fewer_collectives_are_named():
    found = line(sign(0), sign(1, collectives=39), sign(2, collectives=39), sign(3))
    late_ranks = "rank 1 on node1 (step 12, at x.py:39 read), rank 2 on node2 (step 12, at x.py:39 read)"
    assert found == f"hang: no progress of {late_ranks}, {NOTICED}"


def test_ranks_that_never_joined_are_named_with_their_expected_nodes(monkeypatch):
    monkeypatch.setenv("ALL_NODES", "node1\nnode2")
    assert line(sign(0, beats=0), sign(1, beats=0)) == (
        "rendezvous: rank 2 on node2, rank 3 on node2 did not join within 20 s; check that node, or exclude it"
    )


def test_a_rank_that_still_joins_is_named_and_not_the_silent_ranks():
    found = [sign(0, beats=0), sign(1, beats=3), sign(2, beats=3), sign(3, beats=3)]
    assert line(*found, silent=(1, 2, 3)).startswith("hang: no progress of rank 0 on node1 (step 0, at x.py:40 read), ")


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
