"""``KVClient``: what an engine holds of KVHearth. It fails open and never raises to it."""

from __future__ import annotations

import os
import threading

from kvhearth.arena import ArenaMapping
from kvhearth.contract import CONTRACT_JSON_BYTES_MAX, Contract
from kvhearth.decisions import Decisions
from kvhearth.drains import Drain
from kvhearth.errors import KVHearthError, Reason
from kvhearth.keeper import Attached
from kvhearth.results import LookupResult
from kvhearth.url import DaemonUrl, parse_url
from kvhearth.version import PROTOCOL_VERSION
from kvhearth.wire import Hello

ENGINE_ID_CHARS_MAX = 128
_SOCKET_PATH_BYTES_MAX = 107


def connect(
    url: str,
    contract: Contract,
    *,
    engine_id: str,
    scheduler: bool = True,
    rank: int = 0,
    map_arena: bool = True,
) -> KVClient:
    """A client that attaches in the background; the daemon may be away.

    Args:
        url: ``kvhearth+unix:///run/kvhearth``, with options as in ``url.DaemonUrl``.
        contract: what this engine's KV bytes are.
        engine_id: the engine's name, the same in its scheduler and all its ranks.
        scheduler: this process takes the engine's decisions.
        rank: this process's rank, or -1 if it moves no bytes.
        map_arena: map the arena into this process.

    Raises:
        KVHearthError: ``bad_url``, ``bad_contract`` or ``bad_message`` for arguments that cannot
            be right.
    """
    address = parse_url(url)
    if len(os.fsencode(address.attach_path)) > _SOCKET_PATH_BYTES_MAX:
        raise KVHearthError(Reason.BAD_URL, f"{address.attach_path!r} is too long for a socket")
    text = contract.to_json()
    if len(text) > CONTRACT_JSON_BYTES_MAX:
        raise KVHearthError(Reason.BAD_CONTRACT, "the contract's texts are too long")
    if not -1 <= rank < contract.world_size or (rank < 0 and not scheduler):
        raise KVHearthError(
            Reason.BAD_CONTRACT,
            f"rank {rank} is not one of {contract.world_size} ranks, nor -1 of a scheduler",
        )
    if not 0 < len(engine_id) <= ENGINE_ID_CHARS_MAX:
        raise KVHearthError(
            Reason.BAD_MESSAGE, f"engine_id must have 1..{ENGINE_ID_CHARS_MAX} characters"
        )
    hello = Hello(
        protocol=PROTOCOL_VERSION,
        engine_id=engine_id,
        contract=text,
        scheduler=scheduler,
        rank=rank,
        map_arena=map_arena,
        pid=os.getpid(),
    )
    return KVClient(address, contract, hello)


class KVClient(Decisions):
    """Decisions of one attached process; made by ``connect``. Thread-safe.

    No method raises because of the daemon or its absence: the answer is then a miss, or nothing,
    with a reason. In a forked child a client answers ``closed``; the child connects anew.
    """

    def __init__(self, url: DaemonUrl, contract: Contract, hello: Hello) -> None:
        super().__init__(url, contract, hello)
        self._closing = threading.Lock()
        self._let_go = False
        self._keeper.start()

    @property
    def arena(self) -> ArenaMapping | None:
        """The mapped arena of the current boot; None while detached or not asked for."""
        link = None if self._caller.closed else self._keeper.link
        return None if link is None else link.mapping

    @property
    def boot_id(self) -> str:
        """Of the daemon that this client is attached to, or empty."""
        link = None if self._caller.closed else self._keeper.link
        return "" if link is None else link.boot_id

    @property
    def session_id(self) -> str:
        """Of the current attachment, or empty: what was reserved or leased under another is void.

        A session can end and another begin under one boot id.
        """
        link = None if self._caller.closed else self._keeper.link
        return "" if link is None else link.session_id

    @property
    def contract(self) -> Contract:
        """What ``connect`` was given."""
        return self._contract

    @property
    def refusal(self) -> KVHearthError | None:
        """Why the daemon refuses this engine for good, or None."""
        return self._keeper.refusal

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until attached with all ranks; False at once when refused or closed."""
        return not self._caller.closed and self._keeper.wait_ready(timeout_s)

    def cancel(self, found: LookupResult) -> None:
        """The request behind a lookup went away, in the background: its lease ends, and what climbs
        for it alone need not.

        Lookups of another boot are ignored. One that was made without a lease has no name: what it
        let climb goes on.
        """

        def work() -> None:
            link = self._caller.link()
            if found.boot_id != link.boot_id:
                return
            if found.lease is not None:
                self._returns.release_id(link, found.lease.id, climbs=found.eta_us > 0)
            elif found.id and found.eta_us:
                self._returns.cancel(link, found.id)

        self._caller.decide("cancel", work, lambda _: None)

    def add_drain(self, drain: Drain) -> None:
        """Register what waits for this process's copies.

        ``drain(deadline_s)`` returns True when no copy is under way. It is called on the keeper's
        thread before a lost session is let go, and by ``close``; until all drains return True the
        old mapping stays and there is no new session. Copiers of the old mapping should be closed
        by then, or drop their arrays.
        """
        self._keeper.drains.add(drain)

    def add_attached(self, attached: Attached) -> None:
        """Register what is to be prepared for a session: ``attached()`` is called on the keeper's
        thread each time one has begun, and now if there is one. It may be called twice for the same
        session, and must not wait.
        """
        self._keeper.add_attached(attached)

    def counters(self) -> dict[str, int]:
        """Counters since the start, by name; heartbeats carry them to the daemon."""
        return {} if self._caller.foreign else self._counters.snapshot()

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter of the caller's own (loads that failed, bytes copied, ...)."""
        if amount > 0 and not self._caller.foreign:
            self._counters.add(name, amount)

    def close(self, deadline_s: float = 5.0) -> bool:
        """Drain copies, send what is queued, say goodbye. Idempotent.

        Returns:
            False if copies did not drain: the session then stays open, since its end would tell
            the daemon that nobody writes. Call it again, or let the process end.
        """
        if self._caller.foreign:
            return True
        with self._closing:
            if not self._let_go:
                self._caller.close()
                self._keeper.stop(deadline_s)
                self._let_go = self._keeper.finish(deadline_s)
            return self._let_go
