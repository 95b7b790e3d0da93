"""Processes and devices before a run: joining processes, finding hardware, stopping and ending together, faster start-up.

This room knows no model, no state and no config. Hosts and their agents are in `cluster`.
To add a scheduler, add a row to `schedulers.TABLE`. To add an accelerator, add it to `devices.DEVICE_FILES`.
"""
