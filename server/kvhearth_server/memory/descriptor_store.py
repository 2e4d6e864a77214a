"""systemd's descriptor store: it keeps descriptors of sealed memfds while no daemon runs."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Mapping

_PREFIX = "kvhearth-"
_SEND_S = 10.0
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def is_sealed(descriptor: int) -> bool:
    """Whether nobody can resize a memfd; False for any other file."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:
        return False


def descriptor_store(environment: Mapping[str, str] = os.environ) -> DescriptorStore | None:
    """Return the store of this process's systemd unit; None where it has none.

    Args:
        environment: variables in which systemd (254 and newer) says that it keeps descriptors: the
            unit has ``FileDescriptorStoreMax=``.
    """
    if environment.get("NOTIFY_SOCKET") and environment.get("FDSTORE", "0") not in ("", "0"):
        return DescriptorStore(environment)
    return None


class DescriptorStore:
    """Descriptors by name. Those that it kept are inherited from number 3 on; they stay open, so
    that ``take`` may be called again.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._address = environment["NOTIFY_SOCKET"]
        self._kept: dict[str, int] = {}
        if environment.get("LISTEN_PID") == str(os.getpid()):
            names = environment.get("LISTEN_FDNAMES", "").split(":")
            count = int(environment.get("LISTEN_FDS", "0"))
            for number, name in zip(range(3, 3 + count), names, strict=False):
                if name.startswith(_PREFIX):
                    self._kept[name.removeprefix(_PREFIX)] = number

    def take(self) -> dict[str, int]:
        """Return copies of all kept descriptors, by name; the caller closes them."""
        return {
            name: fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3)
            for name, number in self._kept.items()
        }

    def put(self, name: str, descriptor: int) -> None:
        """Keep a copy of a descriptor under a name that is not taken yet.

        Raises:
            OSError: systemd does not answer.
        """
        # Without polling: a memfd reports no hang-up, and epoll refuses it.
        self._send(f"FDSTORE=1\nFDPOLL=0\nFDNAME={_PREFIX}{name}", descriptor)

    def forget(self, name: str) -> None:
        """Close a kept descriptor; an unknown name does nothing.

        Raises:
            OSError: systemd does not answer.
        """
        number = self._kept.pop(name, -1)
        if number >= 0:
            os.close(number)
        self._send(f"FDSTOREREMOVE=1\nFDNAME={_PREFIX}{name}")

    def _send(self, message: str, descriptor: int = -1) -> None:
        address = self._address
        if address.startswith("@"):
            address = "\0" + address[1:]
        descriptors = [descriptor] if descriptor >= 0 else []
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.settimeout(_SEND_S)
            sender.connect(address)
            socket.send_fds(sender, [message.encode()], descriptors)
