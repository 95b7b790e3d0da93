"""State in a file on a local disk.

This room holds the file, the memory that it is read into, the store of arrays, and the measurement of a disk. It decides nothing: which
leaves live on the disk, and when they move, is said by the room above. A file is scratch: it has no name, so it ends with its process
however that ends, and two runs cannot share one. Another way to reach a disk replaces `scratch`, and nothing else.
"""
