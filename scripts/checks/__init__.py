"""The checks of preflight.py: machine.py checks the machine, the site and files, and jobs.py starts jobs.

A check is a function that returns `machine.Lines`. preflight.main calls all checks. Put a check that starts no job into
machine.py.
"""
