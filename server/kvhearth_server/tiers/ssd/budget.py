"""A bound on the bytes that a drive takes a day: flash wears out. Pure."""

from __future__ import annotations

DAY_S = 86400.0


class WriteBudget:
    """A bucket that fills at ``bytes_per_day`` and holds ``burst_bytes``.

    It starts empty but for a tenth of its size, so that restarting again and again writes hardly
    more. Zero bytes a day stand for no bound.
    """

    def __init__(self, bytes_per_day: int, now: float, *, burst_bytes: int = 0) -> None:
        if bytes_per_day < 0 or burst_bytes < 0:
            raise ValueError("a budget is not negative")
        self._rate = bytes_per_day / DAY_S
        self._size = float(burst_bytes or bytes_per_day // 24)
        self._level = self._size / 10
        self._at = now

    @property
    def unbounded(self) -> bool:
        """Whether everything is let through."""
        return self._rate == 0

    def take(self, size: int, now: float) -> bool:
        """Take ``size`` bytes if they are there.

        The last write may overdraw the bucket, so that a block larger than the bucket is not
        kept out for ever; what it overdrew is waited for.
        """
        if self.unbounded:
            return True
        self._fill(now)
        if self._level <= 0:
            return False
        self._level -= size
        return True

    def left(self, now: float) -> int:
        """Bytes that can be taken now; negative after a write that overdrew it."""
        self._fill(now)
        return int(self._level)

    def wait_s(self, now: float) -> float:
        """Seconds until something can be taken."""
        if self.unbounded:
            return 0.0
        self._fill(now)
        return 0.0 if self._level > 0 else -self._level / self._rate + 0.001

    def give_back(self, size: int) -> None:
        """Bytes that were taken and then not written."""
        if not self.unbounded:
            self._level = min(self._size, self._level + size)

    def _fill(self, now: float) -> None:
        passed = max(0.0, now - self._at)
        self._at = max(self._at, now)
        self._level = min(self._size, self._level + passed * self._rate)
