"""Checks of a run's settings, each before anything uses them.

`ranges` compares each value with its declaration in `settings`. `effects` lists settings that nothing reads. `texts` compares a run with
its tokenizer, `host` with this machine's memory, `room` with its disks. `names` gives the library's errors the names of config keys.
A check of one argument of the library belongs beside the function that takes it.
"""
