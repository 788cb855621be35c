"""How long to wait before looking again, for libraries that can only be asked whether something has come."""

from __future__ import annotations

import os
import time

# First again and again, letting other processes run in between; then after a part of the time that the wait has lasted, so that it
# ends at most that part late.
_EAGER_S = 50e-6
_EAGER_WITH_A_CORE_S = 500e-6
_PART = 0.1
_SHORTEST_SLEEP_S = 20e-6
_LONGEST_SLEEP_S = 1e-3


class Backoff:
    """Pauses between looks. `processes` is how many on this machine wait like this one."""

    def __init__(self, processes: int) -> None:
        has_a_core = processes <= len(os.sched_getaffinity(0))
        self._eager_s = _EAGER_WITH_A_CORE_S if has_a_core else _EAGER_S

    def pause(self, waited_s: float) -> None:
        """Returns when it is time to look again, after a wait of `waited_s` so far."""
        if waited_s < self._eager_s:
            os.sched_yield()
        else:
            time.sleep(min(max(_PART * waited_s, _SHORTEST_SLEEP_S), _LONGEST_SLEEP_S))
