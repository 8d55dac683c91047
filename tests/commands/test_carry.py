"""A test of the folder of `make carry`. `make test-image` installs and trains from one."""

import subprocess

import pytest

from helpers import REPOSITORY


@pytest.mark.promise("a centre without internet: one folder, whose files are checked")
def test_the_folder_lists_each_file_and_holds_the_clone(tmp_path):
    folder = tmp_path / "to carry"
    for part in ("wheels", "huggingface"):
        (folder / part).mkdir(parents=True)
        (folder / part / "a file").write_text(part)
    subprocess.run([REPOSITORY / "environment/carry.sh", folder], check=True, capture_output=True)
    check = ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"]
    subprocess.run(check, cwd=folder, check=True)
    subprocess.run(["git", "clone", "--quiet", "workshop.bundle", "clone"], cwd=folder, check=True)
    assert (folder / "clone/environment/install.sh").read_bytes() == (
        REPOSITORY / "environment/install.sh"
    ).read_bytes()
    listed = {line.split("  ")[1] for line in (folder / "SHA256SUMS").read_text().splitlines()}
    assert listed == {"wheels/a file", "huggingface/a file", "workshop.bundle"}
    (folder / "wheels/a file").write_text("changed on the way")
    assert subprocess.run(check, cwd=folder, capture_output=True).returncode == 1
