"""A test of the folder of `make carry`. `make test-image` installs and trains from one."""

import subprocess

import pytest

from helpers import REPOSITORY


@pytest.mark.promise("a centre without internet: one folder, whose files are checked")
def test_the_folder_lists_each_file_and_holds_the_clone(tmp_path):
    def run(*words: object, code: int = 0) -> None:
        assert subprocess.run(words, cwd=tmp_path, capture_output=True).returncode == code

    for part in ("wheels", "huggingface"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "a file").write_text(part)
    (tmp_path / "SHA256SUMS").write_text(f"{'0' * 64}  wheels/older\n")  # an earlier run has left this list
    run(REPOSITORY / "environment/carry.sh", ".")
    listed = [line.split("  ")[1] for line in (tmp_path / "SHA256SUMS").read_text().splitlines()]
    assert listed == ["huggingface/a file", "wheels/a file", "workshop.bundle"]
    run("git", "clone", "workshop.bundle", "clone")
    assert (tmp_path / "clone/environment/install.sh").exists()
    run("sha256sum", "--check", "SHA256SUMS")
    (tmp_path / "wheels/a file").write_text("changed on the way")
    run("sha256sum", "--check", "SHA256SUMS", code=1)
