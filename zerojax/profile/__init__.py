"""The time of a step by phase, from a trace.

This room holds the profiler, the reader of traces and the division of time into phases.
It does no training.
To add a phase, add it to `phases.PHASES` and to the tables there.
"""
