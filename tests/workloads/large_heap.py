"""A hundred megabytes that do not compress, with a checksum for each page; some change in every round."""

import mmap
import os
import random
import zlib

from heartbeat import keep

PAGE = 4096
PAGES = int(os.environ.get("MEGABYTES", "100")) << 8
CHECKED, CHANGED = 2000, 100

heap = mmap.mmap(-1, PAGES * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
noise = os.urandom(PAGE)
sums = []
for number in range(PAGES):
    page = number.to_bytes(8, "little") + noise[8:]
    heap[number * PAGE : (number + 1) * PAGE] = page
    sums.append(zlib.crc32(page))
choice = random.Random(1)


def check(counter):
    for step in range(CHECKED):
        number = (counter * CHECKED + step) % PAGES
        if zlib.crc32(heap[number * PAGE : (number + 1) * PAGE]) != sums[number]:
            return f"page {number} is not what was written"
    for _ in range(CHANGED):
        number = choice.randrange(PAGES)
        heap[number * PAGE + 8 : number * PAGE + 16] = choice.randbytes(8)
        sums[number] = zlib.crc32(heap[number * PAGE : (number + 1) * PAGE])
    return True


keep(check)
