"""The parts of preflight.py, one file per kind of check: machine and site, files, jobs that train."""
