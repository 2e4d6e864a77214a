"""Shares: the part of each bounded resource that others leave a tenant, and the most it may have.

A floor is kept for its tenant: others may use everything but the floors that are not used up. A
tenant that is alone may therefore use everything. Sums are kept with each change; no question
counts anything again.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvhearth.errors import KVHearthError, Reason


class Share(enum.StrEnum):
    """A resource that tenants share."""

    SESSIONS = "sessions"
    NAMESPACES = "namespaces"
    CONTRACT_BYTES = "contract_bytes"
    LEASES = "leases"
    RESERVED = "reserved"
    SSD = "ssd"
    SSD_WRITES = "ssd_writes"


COUNTED = (Share.SESSIONS, Share.NAMESPACES, Share.CONTRACT_BYTES)
"""Resources whose use by tenant is in an ``Account``."""
FLOOR_ONLY = frozenset({Share.SSD, Share.SSD_WRITES})
"""Resources without a cap: the drive and its budget are used as long as nobody else needs them."""
CAP_ONLY = frozenset({Share.RESERVED})
"""Resources without a floor: each tenant has memory of its own, which its engines share."""
DEFAULT_ROW = "default"
"""Name of the row for tenants without one of their own."""


@dataclass(frozen=True)
class Part:
    """A tenant's part of a resource, as fractions of the whole."""

    floor: float
    cap: float = 1.0

    def __str__(self) -> str:
        text = f"{round(self.floor * 100, 6):g}"
        return text if self.cap == 1 else f"{text}-{round(self.cap * 100, 6):g}"


@dataclass(frozen=True)
class TenantShares:
    """One row of the shares: a tenant, or ``DEFAULT_ROW``, and its parts."""

    tenant: str
    parts: tuple[tuple[Share, Part], ...]

    def __str__(self) -> str:
        return f"{self.tenant}=" + ",".join(f"{share}:{part}" for share, part in self.parts)


class Account:
    """Use of one resource by tenant, and the room that each has left.

    ``_taken`` is the sum over tenants of their use or floor, whichever is greater.
    """

    def __init__(self, share: Share, total: int) -> None:
        self.share = share
        self.total = total
        self._floors: Mapping[str, int] = {}
        self._caps: Mapping[str, int] = {}
        self._used: dict[str, int] = {}
        self._taken = 0
        self.used_total = 0

    def allot(self, total: int, parts: Mapping[str, Part]) -> None:
        """Set the whole and the tenants' parts of it."""
        self.total = total
        self._floors = {tenant: int(total * part.floor) for tenant, part in parts.items()}
        self._caps = {tenant: _cap(total, part) for tenant, part in parts.items()}
        tenants = self._floors.keys() | self._used.keys()
        self._taken = sum(max(self.used(each), self.floor(each)) for each in tenants)

    def floor(self, tenant: str) -> int:
        """Amount that others leave to the tenant."""
        return self._floors.get(tenant, 0)

    def cap(self, tenant: str) -> int:
        """Largest amount that the tenant may use."""
        return self._caps.get(tenant, self.total)

    def used(self, tenant: str) -> int:
        """Amount that the tenant uses."""
        return self._used.get(tenant, 0)

    def room(self, tenant: str) -> int:
        """Amount that the tenant may still take; negative if it has more than it may."""
        used, floor = self.used(tenant), self.floor(tenant)
        return min(self.cap(tenant) - used, self.total - self._taken + max(0, floor - used))

    def add(self, tenant: str, amount: int) -> None:
        """Book ``amount`` more, or less if it is negative."""
        before, floor = self.used(tenant), self.floor(tenant)
        after = self._used[tenant] = before + amount
        self._taken += max(after, floor) - max(before, floor)
        self.used_total += amount


def _cap(total: int, part: Part) -> int:
    return max(1, int(total * part.cap)) if part.cap < 1 else total


class Shares:
    """The shares of all tenants."""

    def __init__(self, tenants: Sequence[str] = ()) -> None:
        self.tenants = tuple(tenants)
        self.accounts = {share: Account(share, 0) for share in COUNTED}
        self.refused: dict[tuple[str, Share], int] = {}
        """Refusals by tenant and share."""
        self._parts: dict[tuple[str, Share], Part] = {}
        self._leases_total = 0

    def allot(self, rows: Iterable[TenantShares], totals: Mapping[Share, int]) -> None:
        """Set all parts, and the whole of each resource that is counted, and of the leases."""
        self._parts = parts_of(rows, self.tenants)
        self._leases_total = totals.get(Share.LEASES, 0)
        for share, account in self.accounts.items():
            account.allot(totals[share], {each: self.part(each, share) for each in self.tenants})

    def part(self, tenant: str, share: Share) -> Part:
        """The tenant's part of a resource."""
        return self._parts.get((tenant, share)) or Part(0.0)

    def leases_max(self, tenant: str) -> int:
        """Largest number of leases of a tenant: its cap, or what the others' floors leave."""
        others = sum(self.part(t, Share.LEASES).floor for t in self.tenants if t != tenant)
        most = min(self.part(tenant, Share.LEASES).cap, max(0.0, 1 - others))
        return max(1, int(self._leases_total * most))

    def leases_floor(self, tenant: str) -> int:
        """Number of leases that others leave to a tenant."""
        return int(self._leases_total * self.part(tenant, Share.LEASES).floor)

    def count_refusal(self, tenant: str, share: Share) -> None:
        """Count a refusal."""
        place = (tenant, share)
        self.refused[place] = self.refused.get(place, 0) + 1

    def refusal(self, tenant: str, share: Share) -> KVHearthError:
        """Count a refusal of a counted resource and return its error."""
        self.count_refusal(tenant, share)
        account = self.accounts[share]
        return KVHearthError(
            Reason.SHARE_EXCEEDED,
            f"tenant {tenant} uses {account.used(tenant)} of {account.total} {_WORDS[share]}, as "
            f"many as its share allows; end some, or change {share} in tenant_shares",
            share=str(share),
            tenant=tenant,
        )


_WORDS = {
    Share.SESSIONS: "sessions",
    Share.NAMESPACES: "namespaces",
    Share.CONTRACT_BYTES: "bytes of contracts",
}


def parts_of(rows: Iterable[TenantShares], tenants: Sequence[str]) -> dict[tuple[str, Share], Part]:
    """Return the part of each tenant and resource: from its own row, else from the default row.

    Without either, half of everything is kept as the tenants' floors, in equal parts. One tenant
    needs no floor.
    """
    equal = 0.5 / len(tenants) if len(tenants) > 1 else 0.0
    named = {row.tenant: dict(row.parts) for row in rows}
    fallback = named.get(DEFAULT_ROW, {})
    return {
        (tenant, share): named.get(tenant, {}).get(share)
        or fallback.get(share)
        or Part(0.0 if share in CAP_ONLY else equal)
        for tenant in tenants
        for share in Share
    }


def problems_of(rows: Sequence[TenantShares], tenants: Sequence[str]) -> list[str]:
    """Return what is wrong with shares, one sentence each."""
    names = [row.tenant for row in rows]
    problems = [
        f"{name} is there twice" for name in sorted({n for n in names if names.count(n) > 1})
    ]
    problems += [
        f"{name} is no tenant; use {', '.join(tenants)} or {DEFAULT_ROW}"
        for name in names
        if name not in tenants and name != DEFAULT_ROW
    ]
    parts = parts_of(rows, tenants)
    for share in Share:
        floors = sum(parts[tenant, share].floor for tenant in tenants)
        if floors > 1 + 1e-9:
            problems.append(f"the floors of {share} are {floors:.0%} together; at most 100%")
    return problems
