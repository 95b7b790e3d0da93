"""Offload: state that lives in host memory between its uses, and a step that streams it through the device.

This room holds the settings, the choice of leaves and pieces, their copies, the updates of their groups, the steps around them, and the
budget of host memory. How a step is cut into programs is `step_programs`. This room has no config, no reader of compiled programs and no
file format. Only this room names the memory kind.
Another place to offload to is a value of `settings.KINDS`; another part of the state is a row of `settings.PARTS`.
"""
