"""The parts of preflight.py, one file per kind of check: machine and site, files, jobs.

A check is a function that yields `machine.Lines`; preflight.main calls them. One that needs neither a file nor a job
belongs into machine.py.
"""
