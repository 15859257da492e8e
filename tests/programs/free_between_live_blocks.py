"""Free 600 MB between small live blocks: glibc keeps those pages, because only the end of its heap shrinks.

Prints what three calls of `give_back` say, and how many bytes the process has grown after them.
"""

from recipe.evaluation import validation  # noqa: F401 (as in a run, with all that it imports)
from recipe.hardware.host_memory import FreedMemory, resident_bytes

freed_memory = FreedMemory()
freed_memory.give_back()
before = resident_bytes()
blocks = [(bytearray(100_000), bytearray(1_000)) for _ in range(6000)]
small = [small for _, small in blocks]
del blocks
assert resident_bytes() - before > 5e8, "glibc returned the pages by itself"
given = [freed_memory.give_back() for _ in range(3)]
print(*given, resident_bytes() - before)
