"""Two more hosts, as far as the network goes: namespaces that reach this one and not each other."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

NETWORK_ENV = "KVHEARTH_TEST_NETWORK"
"""Variable that names an engine's network namespace."""


@dataclass(frozen=True)
class Hosts:
    """Namespaces, and the address of this one as each sees it. All of them reach the first one of
    these addresses.
    """

    names: tuple[str, ...]
    gateways: tuple[str, ...]

    def entering(self, number: int) -> tuple[str, ...]:
        """Return the command that executes another one on a host."""
        return ("ip", "netns", "exec", self.names[number])


def _ip(words: str) -> None:
    done = subprocess.run(["ip", *words.split()], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {words}: {done.stderr.strip()}")


@contextlib.contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Make two network namespaces, each with a link to this one; skip where that is not allowed."""
    if shutil.which("ip") is None:
        pytest.skip("needs ip, of iproute2, for network namespaces")
    names = tuple(f"kvh{os.getpid()}{side}" for side in "ab")
    nets = tuple(f"10.231.{200 + index}" for index in range(len(names)))
    with contextlib.ExitStack() as undo:
        try:
            for name, net in zip(names, nets, strict=True):
                _ip(f"netns add {name}")
                undo.callback(_quietly, f"netns delete {name}")
                _ip(f"link add {name}l type veth peer name {name}r netns {name}")
                undo.callback(_quietly, f"link delete {name}l")
                _ip(f"address add {net}.1/30 dev {name}l")
                _ip(f"link set {name}l up")
                _ip(f"-n {name} address add {net}.2/30 dev {name}r")
                _ip(f"-n {name} link set {name}r up")
                _ip(f"-n {name} link set lo up")
                if net != nets[0]:
                    _ip(f"-n {name} route add {nets[0]}.1/32 via {net}.1")
        except OSError as error:
            pytest.skip(f"needs the right to make network namespaces: {error}")
        yield Hosts(names, tuple(f"{net}.1" for net in nets))


def _quietly(words: str) -> None:
    with contextlib.suppress(OSError):
        _ip(words)
