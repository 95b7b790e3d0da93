"""Compiled programs as text.

Here live the parser of HLO, data flow, replica groups, collectives and buffer assignments.
No ZeRO and no config: any program of XLA can be read.
A new opcode or attribute is read in `syntax`; a new kind of collective is a word of `collectives.KINDS`.
"""
