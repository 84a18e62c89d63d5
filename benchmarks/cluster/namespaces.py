"""Hosts on one machine: each is a network namespace, on one bridge, with links of a given rate.

Each host has its own network stack, an interface eth0 whose counters count what it sends and
receives, and its own /etc/hosts. The kernel's token bucket filter shapes what it sends at its
interface, and what it receives at the bridge's port that faces it. The latency is the kernel's own.
"""

import contextlib
import dataclasses
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

# Only namespaces with these names are ever made or removed.
_PREFIX = "jaxsparse"
_OWN = re.compile(rf"{_PREFIX}-(switch|host\d+)$")
_SWITCH = f"{_PREFIX}-switch"
_SUBNET = "10.213.0"
_LOCK = Path("/run") / f"{_PREFIX}-cluster.lock"
_HOSTS_FILES = Path("/etc/netns")  # `ip netns exec` mounts its files over /etc
_QUEUE = "4m"  # bytes that may wait at a link

_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


@dataclasses.dataclass(frozen=True)
class Rate:
    """The rate of a link in one direction, such as `100mbit` or `1gbit`, or `none` for unshaped."""

    name: str  # as `tc` takes it

    def __post_init__(self):
        found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", self.name)
        if self.name != "none" and (found is None or not float(found[1]) > 0):
            raise ValueError(
                f"rate={self.name!r} is not understood: give a number with kbit, mbit or gbit, as "
                "in 100mbit or 1gbit, or none for links that are not shaped"
            )

    @property
    def bits(self) -> float | None:
        """Bits a second, headers included. None if unshaped."""
        if self.name == "none":
            return None
        return float(self.name[:-4]) * _UNITS[self.name[-4:]]

    @property
    def payload(self) -> float | None:
        """Bytes a second that are left for TCP's payload: 1448 of the 1514 in an Ethernet frame."""
        return None if self.bits is None else self.bits / 8 * 1448 / 1514

    @property
    def segment(self) -> int:
        """Bytes that the kernel hands to the link at once (GSO).

        The bucket must hold one segment, and passes as much unshaped after a pause. With the usual
        64 KiB a short message would cross a slow link for nothing. Smaller segments cost the
        processor more.
        """
        for limit, segment in ((2e8, 8_000), (5e8, 16_000), (1e9, 32_000)):
            if self.bits is not None and self.bits <= limit:
                return segment
        return 65_536

    @property
    def burst(self) -> int:
        """Bytes of the bucket: one segment with its headers, and at least 0.5 ms of the rate."""
        assert self.bits is not None
        return max(self.segment + self.segment // 8 + 128, int(self.bits / 8 * 0.5e-3))


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Hosts that are up."""

    hosts: int  # number of hosts
    rate: Rate  # of each link, either way

    @staticmethod
    def name(host: int) -> str:
        """The namespace of a host."""
        return f"{_PREFIX}-host{host}"

    @staticmethod
    def address(host: int) -> str:
        """The IPv4 address of a host."""
        return f"{_SUBNET}.{host + 1}"

    def enter(self, host: int) -> tuple[str, ...]:
        """Words before a command that is to run on a host."""
        return ("ip", "netns", "exec", self.name(host))


def missing() -> str | None:
    """In words, what this machine lacks to emulate a cluster. None: nothing."""
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if absent:
        return f"the commands {' and '.join(absent)} (Debian: apt-get install iproute2)"
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return (
            "root, to make network namespaces and to shape their links: run it with sudo, or in "
            "`unshare --user --map-root-user --net --mount --pid --fork`"
        )
    probe = f"{_PREFIX}-host999"
    try:
        _run("ip", "netns", "add", probe)
        _run("ip", "-n", probe, "link", "add", "probe0", "type", "veth", "peer", "name", "probe1")
        _run(
            *("tc", "-n", probe, "qdisc", "add", "dev", "probe0", "root"),
            *("tbf", "rate", "100mbit", "burst", "9000", "limit", _QUEUE),
        )
    except RuntimeError as error:
        return f"the right to make namespaces and to shape links, which is refused here: {error}"
    finally:
        subprocess.run(("ip", "netns", "del", probe), capture_output=True, check=False)
    return None


@contextlib.contextmanager
def cluster(hosts: int, rate: Rate) -> Iterator[Cluster]:
    """Hosts that exist inside the block, whatever ends it.

    It first removes hosts that an earlier run left behind because it was killed.

    Raises:
        ValueError: `hosts` is out of range.
        RuntimeError: another run has a cluster up, or a command fails.
    """
    if not 2 <= hosts <= 200:
        raise ValueError(f"hosts={hosts} must lie between 2 and 200")
    with _alone(), _signals_raise():
        _remove()
        try:
            up = Cluster(hosts, rate)
            _build(up)
            yield up
        finally:
            _remove()


def _build(up: Cluster) -> None:
    _run("ip", "netns", "add", _SWITCH)
    _run("ip", "-n", _SWITCH, "link", "add", "br0", "type", "bridge", "stp_state", "0")
    _run("ip", "-n", _SWITCH, "link", "set", "br0", "up")
    known = [f"{up.address(host)} {up.name(host)}" for host in range(up.hosts)]
    for host in range(up.hosts):
        name, port, own = up.name(host), f"port{host}", up.address(host)
        inside = ("ip", "-n", name)
        _run("ip", "netns", "add", name)
        _run(
            *("ip", "link", "add", "eth0", "netns", name, "type", "veth"),
            *("peer", "name", port, "netns", _SWITCH),
        )
        _run("ip", "-n", _SWITCH, "link", "set", port, "master", "br0", "up")
        _run(*inside, "link", "set", "lo", "up")
        _run(*inside, "addr", "add", f"{own}/24", "dev", "eth0")
        _run(*inside, "link", "set", "eth0", "gso_max_size", str(up.rate.segment), "up")
        # Set on the route, because the system-wide setting cannot be written in every namespace.
        route = ("route", "replace", f"{_SUBNET}.0/24", "dev", "eth0", "src", own)
        _run(*inside, *route, "congctl", "cubic")
        _shape(name, "eth0", up.rate)
        _shape(_SWITCH, port, up.rate)
        # gloo listens at the address that the machine's own name stands for.
        folder = _HOSTS_FILES / name
        folder.mkdir(parents=True, exist_ok=True)
        lines = ["127.0.0.1 localhost", f"{own} {socket.gethostname()}", *known]
        (folder / "hosts").write_text("\n".join(lines) + "\n")


def _shape(namespace: str, device: str, rate: Rate) -> None:
    if rate.bits is None:
        return
    bucket = ("tbf", "rate", rate.name, "burst", str(rate.burst), "limit", _QUEUE)
    _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *bucket)


def _remove() -> None:
    for line in _run("ip", "netns", "list").splitlines():
        name = line.split()[0] if line.split() else ""
        if not _OWN.match(name):
            continue
        for pid in _run("ip", "netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _run("ip", "netns", "del", name)
        shutil.rmtree(_HOSTS_FILES / name, ignore_errors=True)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    # The kernel lets go of the lock when the process ends, however it does.
    with open(_LOCK, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(
                f"another run has the emulated cluster up (it holds {_LOCK}): wait for its end"
            ) from None
        yield


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Lets SIGTERM and SIGHUP end the block as Ctrl-C does, so that it cleans up."""

    def stop(number: int, _: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = {n: signal.signal(n, stop) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout
