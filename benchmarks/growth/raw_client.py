"""A client process that loads a nats-server over a raw socket: cheap, and without any package, so that the server is the limit.

    python -m benchmarks.growth.raw_client ROLE '{"port": 4222, "subject": "a", "size": 128, "seconds": 2.0}'

ROLE is `publish`, `subscribe`, `store` (publish with JetStream's acks, so many under way at once) or `consume` (pull, ack each
message).  It says when it is connected, waits for a line, works so many seconds, and says in JSON how much it moved and when.
"""

from __future__ import annotations

import json
import re
import resource
import socket
import sys
import time
from typing import Any

CHUNK = 256 * 1024  # bytes written at once
WINDOW = 256  # messages stored that wait for their ack; messages pulled and not acked
SOCKET_S = 20.0
ACK_HEADER = re.compile(rb" (\$JS\.ACK\.\S+) \d+\r\n")


class Connection:
    """A connection to nats-server that has said hello."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), SOCKET_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.send(b'CONNECT {"verbose":false,"pedantic":false,"lang":"raw","version":"1"}\r\n')
        self.buffer = bytearray(CHUNK)
        self.flush()

    def close(self) -> None:
        """Leave."""
        self.socket.close()

    def send(self, data: bytes) -> None:
        """Write all of it."""
        self.socket.sendall(data)

    def read(self) -> bytes:
        """Return what has come. Raises TimeoutError, ConnectionError."""
        count = self.socket.recv_into(self.buffer)
        if not count:
            raise ConnectionError("the server has closed the connection")
        return bytes(memoryview(self.buffer)[:count])

    def flush(self) -> None:
        """Wait until the server has read all that was sent."""
        self.send(b"PING\r\n")
        seen = b""
        while b"PONG\r\n" not in seen:
            seen = seen[-5:] + self.read()
            if b"-ERR" in seen:
                raise ConnectionError(seen.decode(errors="replace"))

    def request(self, subject: str, body: bytes) -> dict[str, Any]:
        """Ask JetStream's API, while nothing else comes. Raises ConnectionError for an error that it tells."""
        self.send(b"SUB _A 7\r\nPUB %b _A %d\r\n%b\r\n" % (subject.encode(), len(body), body))
        seen = b""
        while not (seen.startswith(b"MSG _A 7 ") and b"\r\n" in seen):
            seen += self.read()
        head, _, rest = seen.partition(b"\r\n")
        length = int(head.split()[-1])
        while len(rest) < length + 2:
            rest += self.read()
        self.send(b"UNSUB 7\r\n")
        told: dict[str, Any] = json.loads(rest[:length])
        if "error" in told:
            raise ConnectionError(f"{subject}: {told['error']}")
        return told


def message(subject: str, size: int, reply: str = "") -> bytes:
    """Return one message as it is published."""
    return b"PUB %b %b%d\r\n%b\r\n" % (subject.encode(), f"{reply} ".encode() if reply else b"", size, b"x" * size)


def publish(connection: Connection, order: dict[str, Any]) -> int:
    """Publish without acks, and wait at the end until the server has read all."""
    one = message(order["subject"], order["size"])
    number = max(1, CHUNK // len(one))
    chunk, count = one * number, 0
    while time.time() < order["end"]:
        connection.send(chunk)
        count += number
    connection.flush()
    return count


def subscribe(connection: Connection, order: dict[str, Any]) -> int:
    """Count what comes until the time is over, by its bytes: all messages are equally long."""
    head = len(f"MSG {order['subject']} 1 {order['size']}\r\n") + order["size"] + 2
    end, read = order["end"], 0
    connection.socket.settimeout(0.2)
    while time.time() < end:
        try:
            came = connection.socket.recv_into(connection.buffer)
        except TimeoutError:
            continue
        if not came:
            raise ConnectionError("the server has closed the connection: too slow a consumer")
        read += came
    return read // head


def store(connection: Connection, order: dict[str, Any]) -> int:
    """Publish to a stream, at most WINDOW messages without their ack."""
    half = WINDOW // 2
    chunk = message(order["subject"], order["size"], "_R") * half
    connection.send(b"SUB _R 2\r\n" + chunk + chunk)
    sent, acked, rest = 2 * half, 0, b""
    end = order["end"]
    while acked < sent:
        seen = rest + connection.read()
        if b'"error"' in seen:
            raise ConnectionError(seen[:300].decode(errors="replace"))
        acked += seen.count(b'"seq":')
        rest = seen[-5:]
        if sent - acked <= half and time.time() < end:
            connection.send(chunk)
            sent += half
    return acked


def consume(connection: Connection, order: dict[str, Any]) -> int:
    """Pull messages and ack each, until the time is over."""
    half = WINDOW // 2
    pull = json.dumps({"batch": half, "expires": int(SOCKET_S * 1e9)}).encode()
    pull = b"PUB $JS.API.CONSUMER.MSG.NEXT.%b _P %d\r\n%b\r\n" % (order["consumer"].encode(), len(pull), pull)
    connection.send(b"SUB _P 3\r\n" + pull + pull)
    connection.socket.settimeout(0.2)
    asked, count, rest, end = 2 * half, 0, b"", order["end"]
    while time.time() < end:
        try:
            seen = rest + connection.read()
        except TimeoutError:
            continue
        found = list(ACK_HEADER.finditer(seen))
        rest = seen[found[-1].end() :][-300:] if found else seen[-300:]
        answer = b"".join(b"PUB %b 4\r\n+ACK\r\n" % one.group(1) for one in found)
        count += len(found)
        if asked - count <= half:
            answer, asked = answer + pull, asked + half
        if answer:
            connection.send(answer)
    return count


ROLES = {"publish": publish, "subscribe": subscribe, "store": store, "consume": consume}


def main() -> None:
    """Work, and say what came of it."""
    role, order = sys.argv[1], json.loads(sys.argv[2])
    connection = Connection(order["port"])
    if role == "subscribe":
        connection.send(f"SUB {order['subject']} 1\r\n".encode())
        connection.flush()
    for one in range(order.get("more_subscriptions", 0)):
        connection.send(f"SUB more.{order['subject']}.{one} {one + 100}\r\n".encode())
    connection.flush()
    print('{"ready": true}', flush=True)
    sys.stdin.readline()
    used = resource.getrusage(resource.RUSAGE_SELF)
    begun = time.time()
    count = ROLES[role](connection, {**order, "end": begun + order["seconds"]})
    ended = time.time()
    now = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    print(json.dumps({"role": role, "messages": count, "begun": begun, "ended": ended, "cores": cpu_s / (ended - begun)}))


if __name__ == "__main__":
    main()
