"""Tests of WANDB_ONLINE=1 with a stub for `wandb`: job.sh uploads a job's offline runs when the job ends."""

import subprocess

import pytest

from shell import program, shell_environment

KEY = "s3cret-of-mine"
# Create an offline run as REPORT_TO=wandb does, then end the training
OFFLINE_RUN = "import os; os.makedirs(f\"wandb/{os.environ['JOB_ID']}/wandb/offline-run-1\"); raise SystemExit(%d)"


@pytest.fixture
def job(stub, workshop, tmp_path):
    """Run a job that leaves an offline run. Return its output, its folder and the calls of `wandb`."""
    key = workshop / "experiments" / "wandb_key"
    key.write_text(f"{KEY}\n")
    key.chmod(0o600)
    calls = tmp_path / "calls"

    def run(code: int = 0, upload_code: int = 0, lines: str = "", **variables: object):
        seen = f'printf "%s\\n" "$*" "$WANDB_API_KEY" >>"{calls}"'
        program(tmp_path / "bin", "wandb", f"{seen}\necho uploading\nexit {upload_code}")
        done, folder = stub(OFFLINE_RUN % code, lines=lines, **variables)
        assert done.returncode == (143 if lines else code), done
        return done.stdout + done.stderr, folder, calls.read_text().splitlines() if calls.exists() else []

    return run


@pytest.mark.promise("no secret in any file")
def test_offline_runs_are_uploaded_at_the_end_and_no_log_has_the_key(job, workshop):
    printed, folder, calls = job(WANDB_ONLINE=1)
    (left,) = folder.glob("wandb/*/wandb/offline-run-1")
    assert calls == [f"sync {left.relative_to(folder)}", KEY]
    assert printed.index("status: completed") < printed.index("uploading"), "the record must come first"
    holders = [path for path in workshop.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert holders == [workshop / "experiments" / "wandb_key"]
    assert KEY not in printed


def test_a_failed_upload_keeps_the_exit_code_and_can_be_repeated(job, tmp_path):
    """The training fails too, but its run is still uploaded."""
    printed, folder, calls = job(code=3, upload_code=1, WANDB_ONLINE=1)
    assert len(calls) == 2
    assert "error: wandb sync: ended with exit code 1; run it on a login node" in printed
    assert not list(folder.glob("results/.*"))
    line = printed.split("not uploaded to Weights & Biases; to upload later, run in this folder: ")[1].splitlines()[0]
    program(tmp_path / "bin", "wandb", f'echo "$*" >>"{tmp_path}/later"')
    environment = shell_environment(PATH=f"{tmp_path}/bin:{shell_environment()['PATH']}")
    subprocess.run(["bash", "-c", line], cwd=folder, env=environment, check=True)
    assert (tmp_path / "later").read_text().splitlines() == calls[:1]


@pytest.mark.promise("only their owner can read keys")
@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_key_that_others_can_read_is_not_used(job, workshop, mode):
    (workshop / "experiments" / "wandb_key").chmod(mode)
    printed, _, calls = job(WANDB_ONLINE=1)
    assert "others may read the key; chmod 600 it" in printed
    assert calls == []


STOPPED = {
    "lines": "mkdir -p wandb/$JOB_ID/wandb/offline-run-1\nkill -TERM $$",
    "WANDB_ONLINE": 1,
    "CONTAINER": "env INSIDE=1",
}


@pytest.mark.parametrize(("how", "said"), [({}, 0), (STOPPED, 1)], ids=["not enabled by the site", "stopped"])
def test_a_job_uploads_nothing(job, how, said):
    printed, _, calls = job(**how)
    assert calls == []
    assert printed.count("not uploaded to Weights & Biases; to upload later") == printed.count("Weights & Bi") == said
    assert printed.count("run in this folder: env INSIDE=1 python ") == said
