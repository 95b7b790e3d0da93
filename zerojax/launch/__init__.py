"""Processes and devices before a run: who joins, what hardware is here, what starts when.

No model, no state and no config.
A scheduler is a line of `processes.detect_scheduler`; an accelerator a line of `devices.DEVICE_FILES`.
"""
