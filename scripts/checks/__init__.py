"""The parts of preflight.py, one file per kind of check: the machine with its site and files, and jobs.

A check is a function that yields `machine.Lines`; preflight.main calls them. A check that starts no job belongs into
machine.py.
"""
