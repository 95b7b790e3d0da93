"""Checks of a run's settings, each before anything uses them.

`effects` lists settings that nothing reads. `texts` compares a run with its tokenizer, `host` with this machine's memory, `disk_space` with
its disks, `memory_guard` the compiled step with the devices'. Each value's range is `trainer.ranges`. A check of one argument of the
library belongs beside the function that takes it.
"""
