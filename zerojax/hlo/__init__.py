"""Readers of compiled programs as text.

This room holds the parser of HLO, and readers of data flow, replica groups, collectives and buffer assignments.
It knows no ZeRO and no config: it reads any program of XLA.
To read a new opcode or attribute, extend `syntax`. To read a new kind of collective, add it to `collectives.KINDS`.
"""
