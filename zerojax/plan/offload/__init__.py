"""Plans what a step with offloaded state moves, and how long it takes.

streams   the bytes of the host, the disk and the device; the programs of a step block by block, linked
times     the phases of a step: programs beside copies
"""
