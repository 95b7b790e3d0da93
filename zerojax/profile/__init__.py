"""Where a step's time went, read from a trace.

Here live the profiler, the reader of traces and the division of time into phases.
No training.
A phase is a word of `phases.PHASES` and a line of its tables.
"""
