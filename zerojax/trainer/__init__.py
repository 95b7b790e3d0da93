"""The program behind `python -m zerojax.train`: the rooms put together.

Here live the config's fields and checks, the program built from them, the loop, resuming, metrics and the run's folder.
What another project could use belongs in a room below.
A setting is a field in `config` and a line with its unit in `configs/base.py`.
"""
