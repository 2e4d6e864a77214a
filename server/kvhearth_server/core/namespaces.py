"""Namespaces: tenant and contract, weights epoch, quota and usage."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvhearth.contract import Contract, differences, namespace_digest
from kvhearth.errors import KVHearthError, Reason


@dataclass(slots=True)
class Traffic:
    """Counts of one namespace since the daemon's start.

    Attributes:
        hit_keys, below_keys, miss_keys: keys asked for, by where they were found: in memory, on a
            slower tier only, nowhere.
        stored_blocks, evicted_blocks: blocks that became visible, and that left memory for room.
        fallbacks: decisions for which its engines went on without the cache, as they report.
        asked_tokens, hit_tokens: tokens that lookups named, and could restore from memory.
    """

    hit_keys: int = 0
    below_keys: int = 0
    miss_keys: int = 0
    stored_blocks: int = 0
    evicted_blocks: int = 0
    fallbacks: int = 0
    asked_tokens: int = 0
    hit_tokens: int = 0


@dataclass
class Namespace:
    """One namespace; slots and the journal refer to it by ``number``.

    ``tier_epoch`` counts how often its copies on slower tiers were dropped. It is part of the
    namespace's name there, so that copies from before are never found again. ``label`` names the
    weights at shared tiers, "" those of the contract; None keeps the namespace off these.
    ``model_name`` is the name of a local model's directory, as its first engine told it.
    """

    number: int
    digest: bytes
    tenant: str
    contract: Contract
    epoch: int = 1
    tier_epoch: int = 0
    label: str | None = ""
    model_name: str = ""
    quota_bytes: int | None = None
    used_bytes: int = 0
    blocks: int = 0
    groups: int = 0
    traffic: Traffic = field(default_factory=Traffic, compare=False)

    @property
    def unused(self) -> bool:
        """Whether nobody uses it and it has nothing."""
        return not (self.blocks or self.groups or self.used_bytes)

    @property
    def model(self) -> str:
        """The model for people: a hub's name; of a local model the last name of its path, and four
        digits of the digest of its identity.
        """
        model, revision = self.contract.model, self.contract.revision
        if not self.model_name and not model.startswith(_PATHS):
            return model
        digest = hashlib.sha256(f"{model}\0{revision}".encode()).hexdigest()
        return f"{self.model_name or model.rstrip('/').rpartition('/')[2]}#{digest[:4]}"

    @functools.cached_property
    def contract_json(self) -> str:
        """The contract's canonical JSON."""
        return self.contract.to_json()

    @functools.cached_property
    def contract_text(self) -> str:
        """The contract's canonical JSON as a JSON string, for the durable catalogue."""
        return json.dumps(self.contract_json)


_PATHS = ("/", "~", "./", "../")
NUMBER_MAX = 0xFFFF
CONTRACT_BYTES_MAX = 4 << 20
"""Upper bound on the bytes of all contracts; the durable catalogue always has room for them."""


class Namespaces:
    """The catalogue. ``version`` rises with every change that the shell must make durable."""

    def __init__(
        self,
        count_max: int,
        quota_bytes: int | None = None,
        forgotten: Callable[[int], None] = lambda number: None,
        tenants: int = 1,
    ) -> None:
        """Make an empty catalogue; ``forgotten`` gets the number of each forgotten namespace.

        ``tenants`` is the number of tenants that have the bounds in equal parts.
        """
        self._forgotten = forgotten
        self._count_max = max(1, min(count_max, NUMBER_MAX) // tenants)
        self._bytes_max = CONTRACT_BYTES_MAX // tenants
        self._quota_bytes = quota_bytes
        self.ended: dict[int, Namespace] = {}
        """Private namespaces whose run has ended, the oldest first: nobody can ask for their blocks
        any more.
        """
        self.evict: Callable[[Namespace], object] = lambda namespace: None
        """Evicts the blocks of an ended namespace; set by whoever has them."""
        self.end_pins: Callable[[int, str], object] = lambda number, how: None
        """Ends the pins of a namespace whose blocks nobody will find; set by whoever has them."""
        self._by_digest: dict[bytes, Namespace] = {}
        self._by_number: dict[int, Namespace] = {}
        self._next = 1
        self.version = 0
        self.epoch_floor = 1
        """First epoch of a new namespace: above the epoch of every forgotten one, so that an engine
        which returns with old weights does not find its old epoch current again.
        """

    def __len__(self) -> int:
        return len(self._by_number)

    def __iter__(self) -> Iterator[Namespace]:
        return iter(list(self._by_number.values()))

    def __contains__(self, number: int) -> bool:
        return number in self._by_number

    def get(self, number: int) -> Namespace:
        """The namespace of a number that is in use."""
        return self._by_number[number]

    def find_number(self, number: int) -> Namespace | None:
        """The namespace of a number; an ended group may name one that made place for another."""
        return self._by_number.get(number)

    def find(self, digest: bytes) -> Namespace | None:
        """The namespace with a digest."""
        return self._by_digest.get(digest)

    def obtain(self, tenant: str, contract: Contract) -> Namespace:
        """Return the namespace of a tenant's contract, made if new.

        Raises:
            KVHearthError: ``too_many_namespaces`` if the tenant's part of the catalogue is full of
                namespaces in use.
        """
        digest = namespace_digest(tenant, contract)
        if found := self._by_digest.get(digest):
            return found
        size = len(contract.to_json())
        while self._is_full(tenant, size):
            if not self._forget_of(tenant):
                raise KVHearthError(
                    Reason.TOO_MANY_NAMESPACES,
                    f"tenant {tenant} uses all its namespaces ({self._count_max}, with "
                    f"{self._bytes_max} bytes of contracts); evict one or raise namespaces_max, "
                    "which tenants have in equal parts",
                )
        number, epoch = self._free_number(), self.epoch_floor
        made = Namespace(number, digest, tenant, contract, epoch, quota_bytes=self._quota_bytes)
        self._add(made)
        self.version += 1
        return made

    def restore(
        self,
        number: int,
        tenant: str,
        contract: Contract,
        epoch: int,
        tier_epoch: int,
        label: str | None,
        model_name: str,
    ) -> Namespace:
        """Restore a namespace from the durable catalogue."""
        digest = namespace_digest(tenant, contract)
        quota = self._quota_bytes
        made = Namespace(
            number, digest, tenant, contract, epoch, tier_epoch, label, model_name, quota
        )
        self._add(made)
        return made

    def name_model(self, namespace: Namespace, model_name: str) -> None:
        """Name the model for people, unless it has a name."""
        if model_name and not namespace.model_name:
            namespace.model_name = model_name
            self.version += 1

    def bump(self, namespace: Namespace, expected: int, label: str | None = None) -> int:
        """Raise the weights epoch if it is the expected one; returns the new one. ``label`` names
        the new weights at shared tiers.

        Raises:
            KVHearthError: ``stale_epoch`` naming the current epoch.
        """
        check_epoch(namespace, expected)
        namespace.epoch += 1
        namespace.label = label
        self.version += 1
        self.end_pins(namespace.number, "epoch")
        return namespace.epoch

    def relabel(self, namespace: Namespace, expected: int, label: str | None) -> int:
        """Name the weights of the current epoch, if it is the expected one; returns it.

        Raises:
            KVHearthError: ``stale_epoch`` naming the current epoch, also if its weights have
                another label.
        """
        check_epoch(namespace, expected)
        if namespace.label != label:
            if namespace.label:
                raise KVHearthError(
                    Reason.STALE_EPOCH,
                    f"the weights of epoch {namespace.epoch} have another label; bump the epoch",
                    epoch=str(namespace.epoch),
                )
            namespace.label = label
            self.version += 1
        return namespace.epoch

    def drop_copies(self, namespace: Namespace) -> None:
        """Give the namespace a new name on slower tiers."""
        namespace.tier_epoch += 1
        self.version += 1

    def explain(
        self, tenant: str, contract: Contract, count_max: int = 8
    ) -> list[tuple[Namespace, list[tuple[str, str, str]]]]:
        """The tenant's namespaces, nearest first, each with the fields that differ."""
        pairs = [
            (space, differences(contract, space.contract))
            for space in self._by_number.values()
            if space.tenant == tenant
        ]
        return sorted(pairs, key=lambda pair: (len(pair[1]), pair[0].number))[:count_max]

    def _is_full(self, tenant: str, size: int) -> bool:
        """Whether a tenant has no room for a namespace with a contract of ``size`` bytes."""
        mine = self._of(tenant)
        taken = sum(len(space.contract_json) for space in mine)
        return len(mine) >= self._count_max or taken + size > self._bytes_max

    def _add(self, namespace: Namespace) -> None:
        self._by_digest[namespace.digest] = namespace
        self._by_number[namespace.number] = namespace
        self._next = max(self._next, namespace.number + 1)

    def _free_number(self) -> int:
        """Return the next number; after the last one, numbers of forgotten namespaces are reused.

        A forgotten namespace has no blocks, so no header with its number can be mistaken for one of
        a new namespace.
        """
        if self._next <= NUMBER_MAX:
            return self._next
        return next(n for n in range(1, NUMBER_MAX + 1) if n not in self._by_number)

    def forget_ended(self) -> None:
        """Forget the ended namespaces that have no blocks any more."""
        for space in [each for each in self.ended.values() if each.unused]:
            self._forget(space)

    def _of(self, tenant: str) -> list[Namespace]:
        return [space for space in self._by_number.values() if space.tenant == tenant]

    def _forget_of(self, tenant: str) -> bool:
        """Forget an empty or ended namespace of a tenant; false if there is none."""
        unused = [space for space in self._of(tenant) if space.unused]
        for space in [*unused, *(each for each in self.ended.values() if each.tenant == tenant)]:
            if not space.unused:
                self.evict(space)
            if space.unused:
                self._forget(space)
                return True
        return False

    def _forget(self, space: Namespace) -> None:
        del self._by_number[space.number]
        del self._by_digest[space.digest]
        self.ended.pop(space.number, None)
        self.epoch_floor = max(self.epoch_floor, space.epoch + 1)
        self.version += 1
        self.end_pins(space.number, "ended")
        self._forgotten(space.number)


def check_epoch(namespace: Namespace, epoch: int) -> None:
    """Refuse any epoch but the current one.

    Raises:
        KVHearthError: ``stale_epoch`` naming both.
    """
    if epoch != namespace.epoch:
        raise KVHearthError(
            Reason.STALE_EPOCH,
            f"epoch {epoch} is not the namespace's epoch {namespace.epoch}; attach again",
            epoch=str(namespace.epoch),
        )
