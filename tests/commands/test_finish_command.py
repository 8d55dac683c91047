"""job.finish as job.sh starts it, in the seconds between SIGTERM and SIGKILL."""

import json
import subprocess
import sys

from helpers import REPOSITORY
from json_files import write_json


def test_finish_py_finishes_the_record_of_a_killed_run(command, tmp_path):
    path = tmp_path / "work" / "results" / "7.json"
    path.parent.mkdir()
    write_json(path, {"status": "running", "exit_code": None, "finished": None, "job_id": "7", "more": [1]})
    finished = command("job.finish", "7", "--exit-code", "137")
    assert finished.code == 137, finished
    content = json.loads(path.read_text())
    assert (content["status"], content["exit_code"], content["more"]) == ("failed", 137, [1])
    assert content["finished"]
    assert "status: failed (exit code 137)" in finished.stdout


def test_end_of_job_summary_imports_nothing_large():
    code = "import json, sys, job.finish; print(json.dumps(sorted(sys.modules)))"
    path = {"PYTHONPATH": f"{REPOSITORY}/scripts"}
    done = subprocess.run([sys.executable, "-c", code], env=path, capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "pandas", "yaml", "matplotlib"} & set(json.loads(done.stdout))
