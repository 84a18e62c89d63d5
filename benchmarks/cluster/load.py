"""Measures how busy other programs keep the machine, because times are worth less meanwhile."""

import os
import time


class Others:
    """Counts the processor time of all processes that do not descend from one.

    Args:
        root: id of a process that does not count, nor do its descendants.
    """

    def __init__(self, root: int):
        self._root = root
        self._start, self._before = time.monotonic(), _processes()

    def cores(self) -> float:
        """Cores that others kept busy, on average since this was made."""
        after = _processes()
        own = {self._root}
        # A child nearly always has a greater id than its parent. The second pass is for the rest.
        for _ in range(2):
            own |= {pid for pid, (parent, _) in sorted(after.items()) if parent in own}
        ticks = sum(
            used - self._before.get(pid, (0, 0))[1]
            for pid, (parent, used) in after.items()
            # 2 is the parent of kernel threads, which work for every sender.
            if pid not in own and pid != 2 and parent != 2
        )
        return ticks / os.sysconf("SC_CLK_TCK") / max(1e-3, time.monotonic() - self._start)


def _processes() -> dict[int, tuple[int, int]]:
    """Parent and clock ticks used so far of each process."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        found[int(name)] = int(fields[1]), int(fields[11]) + int(fields[12])
    return found
