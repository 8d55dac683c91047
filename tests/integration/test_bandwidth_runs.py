"""measure_bandwidth.py between two real ranks over gloo."""

import json

from helpers import start

NAMES = ["bus_bandwidth_gb_per_s", "ranks", "message_bytes", "iterations", "backend", "algorithm", "transport"]


def test_the_result_says_what_was_measured_and_decides(workplace):
    words = ("--output", "bandwidth.json")
    options = {"script": "scripts/measure_bandwidth.py", "processes": 2, "launcher": "launch.py"}
    done = start(workplace, "bandwidth", *words, **options, MIN_BANDWIDTH=1000).wait()
    result = json.loads((workplace / "bandwidth.json").read_text())
    assert list(result) == NAMES
    assert (result["ranks"], result["backend"]) == (2, "gloo")
    assert (result["message_bytes"], result["iterations"]) == (4 * 2**20, 5)
    figure = result["bus_bandwidth_gb_per_s"]
    assert f"bandwidth test: bus_bandwidth_gb_per_s {figure}, ranks 2, " in done.log
    assert done.code == 3, done
    (error,) = done.error_lines
    expected = f"error: bandwidth test: {figure} GB/s between 2 ranks, at least 1000.0 GB/s expected; set NCCL_SOCKET"
    assert error.startswith(expected)

    assert start(workplace, "no_limit", **options, MIN_BANDWIDTH=0).wait().code == 0
