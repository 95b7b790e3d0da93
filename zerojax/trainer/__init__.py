"""The program behind `python -m zerojax.train`. It connects the other rooms.

This room holds the settings and their checks, the program built from them, the loop, resuming, metrics and the run's folder.
`checks`, `tuning` and `card` import the modules at its root, which import of its folders `clients` alone.
Code that another project could use belongs in a room below.
To add a setting, add a line to `settings`.
"""
