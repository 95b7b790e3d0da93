"""Pipelines: layers on several groups of devices, which work on different micro-batches at the same time.

This room holds the order of the passes, the cut of a pass into stages, their programs, and the step that sends them. Another schedule is a
function of `order`. Within a group ZeRO, tensor and context parallelism are what they are without a pipeline.
"""
