"""Offload: steps that stream state, which lives in host memory or on a disk, through the device.

This room holds the updates of offloaded groups, the steps around them, and the copies beside programs. Which state is where is `host`; how
a step is cut into programs is `step_programs`. It has no config, no reader of compiled programs and no file format.
"""
