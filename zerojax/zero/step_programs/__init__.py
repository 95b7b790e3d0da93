"""Step programs: a step that is cut at its blocks, one program for each part, and the order in which the programs are sent.

This room holds the marks in a trace, the cut, the programs, their schedule, and the passes of a step that add up. It does not know where a
state is stored, nor what an update is: arguments that come while programs run are brought by the room that stores them (`arrivals`).
Another order of programs is a module beside `schedule`; what brings arguments from elsewhere is an `ArgumentSource` in its own room.
"""
