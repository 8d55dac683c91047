"""measure_bandwidth.py between two real ranks over gloo."""

import json
import re

from helpers import start

NAMES = ["bus_bandwidth_gb_per_s", "ranks", "message_bytes", "iterations", "backend", "algorithm", "transport"]
# Both ranks pay for each byte, as on a network of this many bytes per second. The parts of a message are powers of two.
BYTES_PER_SECOND = 2e6
SLOW = f"""
import sys, time

sys.path.insert(0, {{scripts!r}})
import measure_bandwidth
from parallel.distributed import run_and_exit

fast = measure_bandwidth.dist.all_reduce


def slow(tensor, **options):
    fast(tensor, **options)
    time.sleep(tensor.nbytes / {BYTES_PER_SECOND})


measure_bandwidth.dist.all_reduce = slow
run_and_exit(measure_bandwidth.main)
"""


def test_the_result_says_what_was_measured(workplace):
    test = {"script": "scripts/measure_bandwidth.py", "processes": 2}
    done = start(workplace, "plain", "--output", "plain.json", **test).wait()
    assert done.code == 0, done
    result = json.loads((workplace / "plain.json").read_text())
    assert list(result) == NAMES
    assert (result["ranks"], result["backend"]) == (2, "gloo")
    assert (result["message_bytes"], result["iterations"]) == (4 * 2**20, 5)
    assert f"bandwidth test: bus_bandwidth_gb_per_s {result['bus_bandwidth_gb_per_s']}, ranks 2, " in done.log

    given = ("--message_bytes", 65539, "--warm_up", 0, "--iterations", 3)
    done = start(workplace, "given", *given, "--output", "given.json", **test).wait()
    assert done.code == 0, done
    result = json.loads((workplace / "given.json").read_text())
    assert (result["message_bytes"], result["iterations"]) == (65536, 3), "whole floats"


def test_a_slow_network_is_said_with_its_figure(workplace):
    (workplace / "slow.py").write_text(SLOW.format(scripts=str((workplace / "scripts").resolve())))
    options = {"script": "slow.py", "processes": 2, "MIN_BANDWIDTH": "1"}
    done = start(workplace, "slow", "--output", "slow.json", **options).wait()
    assert done.code == 1, done  # torchrun's own, for 3 of a rank
    (error,) = done.error_lines
    figure = re.match(r"error: bandwidth test: (\S+) GB/s between 2 ranks, at least 1.0 GB/s expected; ", error)
    result = json.loads((workplace / "slow.json").read_text())
    assert float(figure[1]) == result["bus_bandwidth_gb_per_s"]
    assert 0 < result["bus_bandwidth_gb_per_s"] <= BYTES_PER_SECOND / 1e9
    assert result["message_bytes"] < 4 * 2**20, "the budget is 5 s, and 4 MiB would take 2 s, seven times"
