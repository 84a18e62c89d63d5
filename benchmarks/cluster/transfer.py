"""Shows that a link has its rate, by one TCP connection that carries as much as it can.

python transfer.py receive PORT         prints Mbit/s of payload once the sender is done
python transfer.py send ADDRESS PORT SECONDS
"""

import socket
import subprocess
import sys
import time
from typing import Any

import namespaces

_CHUNK = bytes(1 << 18)
_PORT = 5301


def receive(port: int) -> float:
    """Payload in Mbit/s, without the first 0.2 s, in which the connection speeds up."""
    with socket.create_server(("", port)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
    with connection:
        start, counted, arrived = time.perf_counter(), None, 0
        while data := connection.recv(1 << 18):
            arrived += len(data)
            last = time.perf_counter()
            if counted is None and last - start > 0.2:
                counted, arrived = last, 0
    if counted is None:
        raise ValueError("the transfer was too short: send for at least a second")
    return 8e-6 * arrived / (last - counted)


def send(address: str, port: int, seconds: float) -> None:
    with socket.create_connection((address, port)) as connection:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            connection.sendall(_CHUNK)


def ring(up: namespaces.Cluster, seconds: float = 1.5) -> list[float]:
    """Mbit/s of payload that each host receives from the one before it, all at the same time."""
    script = (sys.executable, __file__)
    receivers = [
        subprocess.Popen(
            (*up.enter(host), *script, "receive", str(_PORT)), stdout=subprocess.PIPE, text=True
        )
        for host in range(up.hosts)
    ]
    senders: list[subprocess.Popen[bytes]] = []
    try:
        for receiver in receivers:
            assert receiver.stdout is not None
            receiver.stdout.readline()
        for host in range(up.hosts):
            target = up.address((host + 1) % up.hosts)
            command = (*up.enter(host), *script, "send", target, str(_PORT), str(seconds))
            senders.append(subprocess.Popen(command))
        return [float(receiver.communicate(timeout=seconds + 20)[0]) for receiver in receivers]
    finally:
        running: list[subprocess.Popen[Any]] = [*receivers, *senders]
        for process in running:
            process.kill()
            process.wait()


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        print(receive(int(sys.argv[2])))
    else:
        send(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
