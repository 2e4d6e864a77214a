"""Attacks of one tenant on what tenants share: sessions, the catalogue, stock."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

from kvhearth.contract import TEXT_CHARS_MAX, Contract
from kvhearth.errors import KVHearthError, Reason
from kvhearth.proto.v1 import cache_pb2, types_pb2
from kvhearth.session.link import Session
from kvhearth.wire import frames
from kvhearth_lab.harness.engine import contract_of
from kvhearth_lab.hostile.attack import SECOND_UID, Attack, Target
from kvhearth_lab.hostile.attacks_general import answer, enter, frame, opened


class AllSessions(Attack):
    """Attaches until the daemon refuses, holds all sessions, and goes on trying.

    The good client attaches again and again meanwhile.
    """

    name = "all_sessions"
    help = "tenant a holds as many sessions as it gets, and tries for more"
    needs = frozenset({SECOND_UID})
    pause_s = 0.01
    seconds_least = 4.0
    reason: ClassVar[Reason] = Reason.TOO_MANY_SESSIONS

    def __init__(self) -> None:
        super().__init__()
        self._held: list[Session] = []

    def contract(self, target: Target, number: int) -> Contract:
        """Return the contract of the next session."""
        return contract_of(target.page_bytes, model="hostile")

    def run(self, target: Target, number: int) -> Iterator[None]:
        while True:
            count = len(self._held)
            made = self.contract(target, count)
            try:
                self._held.append(enter(target, f"all-{os.getpid()}-{count}", made=made))
            except KVHearthError as error:
                if error.reason is not self.reason:
                    raise
            yield

    def check(self, target: Target, log: Sequence[str]) -> list[str]:
        """Miss ``part`` unless the tenant's part was the bound that refused it."""
        return [] if any(self.reason in line for line in log) else ["part"]


class AllContracts(AllSessions):
    """The same with contracts of 45 KB, each of its own, which together fill the catalogue."""

    name = "all_contracts"
    help = "tenant a holds namespaces with contracts of 45 KB until the catalogue takes no more"
    pause_s = 0.02
    reason = Reason.TOO_MANY_NAMESPACES

    def contract(self, target: Target, number: int) -> Contract:
        long = "\u00e9" * TEXT_CHARS_MAX
        made = contract_of(target.page_bytes, model=f"{os.getpid()}-{number}")
        made = replace(made, revision=long, layout=long, quantization=long, hash_seed=long)
        return replace(made, rope_digest=long, draft_model=long, model_dtype=long)


class HeldStock(Attack):
    """Engines that reserve all they may, and hold it."""

    name = "held_stock"
    help = "tenant a attaches engines that reserve all slots they get and hold them"
    pause_s = 0.05
    engines: ClassVar[int] = 12
    asked: ClassVar[int] = 4096

    def run(self, target: Target, number: int) -> Iterator[None]:
        sessions = [enter(target, f"stock-{os.getpid()}-{each}") for each in range(self.engines)]
        lines = [opened(target, session) for session in sessions]
        turn = 0
        while True:
            turn += 1
            for session, line in zip(sessions, lines, strict=True):
                counts = [types_pb2.GroupCount(group=0, count=self.asked)]
                request = cache_pb2.ReserveRequest(
                    reservation_id=turn, epoch=session.welcome.epoch, groups=counts
                )
                line.sendall(frame(frames.METHODS["Reserve"], request.SerializeToString()))
                answer(line)
            yield
