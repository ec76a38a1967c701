"""Lists what suites against request smuggling send, and how often it may be answered.

The classes are those of PortSwigger's HTTP Request Smuggler (permutations of `Transfer-Encoding` and `Content-Length`, CL.TE,
TE.CL, TE.TE, CL.0, TE.0, 0.CL, paused bodies), of smuggler (defparam) and of what the HTTP Garden (narfindustries) found.
The bytes are written for the routes of this server. `INNER` is the request that each one tries to smuggle: it is answered 404.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from tests.support.frontend.fakes import chat
from tests.support.rude_server import PATH

BODY = json.dumps(chat()).encode()
INNER = b"GET /smuggled HTTP/1.1\r\nhost: localhost\r\n\r\n"
REFUSED = (400,)


@dataclass(frozen=True)
class Vector:
    """Bytes on a connection, and the statuses of all answers to them. `kept`: what comes behind them is answered too.

    On a connection that is not kept the last answers may be missing.
    """

    name: str
    raw: bytes
    statuses: tuple[int, ...] = REFUSED
    kept: bool = False


def head(*lines: bytes, start: bytes = b"POST " + PATH.encode() + b" HTTP/1.1") -> bytes:
    return b"\r\n".join([start, b"host: localhost", b"content-type: application/json", *lines, b"", b""])


def chunked(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


def _encodings() -> Iterator[bytes]:
    """Lines that one reader takes for `Transfer-Encoding: chunked` and another one does not."""
    for odd in (*range(9), *range(11, 32), 0x7F, 0x80, 0x85, 0x8F, 0xA0, 0xAD, 0xFF):
        byte = bytes([odd])
        if odd != 13:
            yield b"transfer-encoding: " + byte + b"chunked"
            yield b"transfer-encoding: chunked" + byte
        yield b"transfer-encoding" + byte + b": chunked"
        yield byte + b"transfer-encoding: chunked"
        yield b"transfer" + byte + b"encoding: chunked"
    for value in (
        *(b"xchunked", b"chunkedx", b"chunk", b"chunked;q=1", b'"chunked"', b"'chunked'", b"chunked chunked", b"\\chunked"),
        *(b"identity", b"identity, chunked", b"chunked, identity", b"chunked, chunked", b"gzip, chunked", b"chunked, gzip"),
        *(b",chunked", b"chunked,", b", chunked", b"cow, chunked", b"chunked, cow", b"", b"gzip", b"chun\xe2\x84\xaaed"),
        *(b"=?iso-8859-1?B?Y2h1bmtlZA==?=", b"ch%75nked", b"\r\n chunked", b"\r\n\tchunked", b"\n chunked", b"\r\r chunked"),
        *(
            b"chunked\r\ntransfer-encoding: chunked",
            b"chunked\r\ntransfer-encoding: identity",
            b"chunked\r\ntransfer-encoding: x",
        ),
        *(b"identity\r\ntransfer-encoding: chunked", b"x\r\ntransfer-encoding: chunked", b"\r\ntransfer-encoding: chunked"),
    ):
        yield b"transfer-encoding: " + value
    yield from (b"transfer-encoding : chunked", b"transfer-encoding chunked", b"transfer-encoding\r\n: chunked")
    yield from (b"transfer-\r\nencoding: chunked", b" transfer-encoding: chunked", b"\ttransfer-encoding: chunked")
    yield from (
        b"x: y\rtransfer-encoding: chunked",
        b"x: y\ntransfer-encoding: chunked",
        b"x: y\r\n\rtransfer-encoding: chunked",
    )
    yield from (
        b"x: y\r\r\ntransfer-encoding: chunked",
        b"x: y\0transfer-encoding: chunked",
        b": x\r\ntransfer-encoding: chunked",
    )


def _encoding_vectors() -> Iterator[Vector]:
    inner = chunked(INNER)
    for line in _encodings():
        named = repr(line)
        body = b"0\r\n\r\n" + INNER
        yield Vector(f"CL.TE {named}", head(b"content-length: %d" % len(body), line) + body)
        yield Vector(f"TE.CL {named}", head(line, b"content-length: 4") + inner)
        yield Vector(f"TE.TE {named}", head(b"transfer-encoding: chunked", line) + body)
        yield Vector(f"TE alone {named}", head(line) + body)


def _plain_encodings() -> Iterator[Vector]:
    for line in (
        *(b"Transfer-Encoding: chunked", b"transfer-encoding:chunked", b"TRANSFER-ENCODING: CHUNKED"),
        *(b"transfer-encoding:\tchunked", b"transfer-encoding: \t chunked"),
    ):
        yield Vector(f"one reading {line!r}", head(line) + chunked(BODY), (200,), kept=True)
    for line in (
        *(b"xtransfer-encoding: chunked", b"transfer-encodingx: chunked", b"transfer_encoding: chunked"),
        *(b"content-encoding: chunked", b"x: transfer-encoding: chunked", b"te: chunked", b"connection: transfer-encoding"),
    ):
        body = b"0\r\n\r\n" + INNER
        yield Vector(f"no such header {line!r}", head(b"content-length: %d" % len(body), line) + body, (400,), kept=True)


def _lengths() -> Iterator[Vector]:
    n = len(BODY)
    for value in (
        *(b"+%d" % n, b"-%d" % n, b"0x%x" % n, b"0_%d" % n, b"%d.0" % n, b"%de0" % n, b"%d,%d" % (n, n), b"%d, %d" % (n, n)),
        *(
            b"%d 0" % n,
            b"%d;a" % n,
            b"",
            b" ",
            b",%d" % n,
            b"%d," % n,
            b"\x0b%d" % n,
            b"\xa0%d" % n,
            b"%d\xa0" % n,
            b"%d\0" % n,
        ),
        *(b"18446744073709551616", b"%d" % (2**64 + n), b"9" * 40, b"\r\n %d" % n, b"%d\r\n 0" % n, b'"%d"' % n),
        *(b"%d\r\ncontent-length: %d" % (n, n), b"%d\r\ncontent-length: 0" % n, b"0\r\ncontent-length: %d" % n),
        *(b"\r\ncontent-length: %d" % n, b"%d\r\ncontent-length:" % n, b"%d\r\ncontent-length: x" % n, b"%dZ" % n, b"1 0"),
    ):
        yield Vector(f"length {value!r}", head(b"content-length: " + value) + BODY)
    for line in (
        *(b"content-length : %d" % n, b"content-length %d" % n, b"content-length\0: %d" % n, b"content-length\x85: %d" % n),
        *(b" content-length: %d" % n, b"content-\r\nlength: %d" % n, b"x: y\rcontent-length: %d" % n),
    ):
        yield Vector(f"length {line!r}", head(line) + BODY)
    for value in (b"%d" % n, b"0%d" % n, b"0" * 30 + b"%d" % n, b"%d   " % n, b"\t%d\t" % n):
        yield Vector(f"one length {value!r}", head(b"content-length: " + value) + BODY, (200,), kept=True)


def _chunks() -> Iterator[Vector]:
    size, n = b"%x" % len(BODY), len(BODY)
    for name, raw in {
        "0x": b"0x%b\r\n%b\r\n0\r\n\r\n" % (size, BODY),
        "_": b"0_%b\r\n%b\r\n0\r\n\r\n" % (size, BODY),
        "+": b"+%b\r\n%b\r\n0\r\n\r\n" % (size, BODY),
        "-0": b"-0\r\n\r\n" + INNER,
        "-0x0": b"-0x0\r\n\r\n" + INNER,
        "longest prefix": b"%bz\r\n%b\r\n0\r\n\r\n" % (size, BODY),
        "not a number": b"INVALID!!!\r\n" + INNER,
        "empty": b"\r\n\r\n" + INNER,
        "one more line end": b"%b\r\n%b\r\n\r\n0\r\n\r\n" % (size, BODY),
        "overflow": b"1%016x\r\n%b\r\n0\r\n\r\n" % (n, BODY),
        "far overflow": b"f" * 40 + b"\r\n" + BODY,
        "space before": b" %b\r\n%b\r\n0\r\n\r\n" % (size, BODY),
        "many spaces before": b"           0\r\n\r\n" + INNER,
        "space behind": b"%b \r\n%b\r\n0\r\n\r\n" % (size, BODY),
        "tab behind": b"%b\t\r\n%b\r\n0\r\n\r\n" % (size, BODY),
        "bare LF behind the size": b"%b\n%b\r\n0\r\n\r\n" % (size, BODY),
        "bare LF behind the content": b"%b\r\n%b\n0\r\n\r\n" % (size, BODY),
        "bare LF behind the last size": b"%b\r\n%b\r\n0\n\r\n" % (size, BODY),
        "bare LF at the end": b"%b\r\n%b\r\n0\r\n\n" % (size, BODY),
        "CR and another byte behind the size": b"%b\r\r%b\r\n0\r\n\r\n" % (size, BODY),
        "two other bytes behind the content": b"%b\r\n%bXX0\r\n\r\n" % (size, BODY),
        "bare LF in an extension": b"%b;a\n%b\r\n0\r\n\r\n" % (size, BODY),
        "bare LF in an extension's value": b"%b;a=b\n%b\r\n0\r\n\r\n" % (size, BODY),
        "CR in an extension": b"%b;a\rb\r\n%b\r\n0\r\n\r\n" % (size, BODY),
        "CR before an extension": b"%b\r\r;a\r\n%b\r\n0\r\n\r\n" % (size, BODY),
        "two CR in an extension": b"%b;a=b\r\rX\r\n%b\r\n0\r\n\r\n" % (size, BODY),
        "line end in a quoted extension": b'%b;a="b\r\n"\r\n%b\r\n0\r\n\r\n' % (size, BODY),
        "LF in a quoted extension": b'%b;a="b\n"\r\n%b\r\n0\r\n\r\n' % (size, BODY),
        "NUL in an extension": b"%b;a\0b\r\n%b\r\n0\r\n\r\n" % (size, BODY),
        "length as a trailer": b"%b\r\n%b\r\n0\r\ncontent-length: 5\r\n\r\n" % (size, BODY),
        "encoding as a trailer": b"%b\r\n%b\r\n0\r\ntransfer-encoding: chunked\r\n\r\n" % (size, BODY),
        "bare LF in a trailer": b"%b\r\n%b\r\n0\r\na: b\n\r\n" % (size, BODY),
        "CR in a trailer": b"%b\r\n%b\r\n0\r\na: b\rc: d\r\n\r\n" % (size, BODY),
        "no colon in a trailer": b"%b\r\n%b\r\n0\r\nGET / HTTP/1.1\r\n\r\n" % (size, BODY),
    }.items():
        yield Vector(f"chunk: {name}", head(b"transfer-encoding: chunked") + raw)
    for name, raw in {
        "plain": chunked(BODY),
        "an extension": b"%b;a=b\r\n%b\r\n0;c\r\n\r\n" % (size, BODY),
        "a quoted extension": b'%b;a="b;c"\r\n%b\r\n0\r\n\r\n' % (size, BODY),
        "leading zeros": b"00000000%b\r\n%b\r\n000\r\n\r\n" % (size, BODY),
        "capitals": b"%b\r\n%b\r\n0\r\n\r\n" % (size.upper(), BODY),
        "bytes one by one": b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n",
        "a trailer that looks like a request": b"%b\r\n%b\r\n0\r\nX:%b" % (size, BODY, INNER),
        "a trailer": b"%b\r\n%b\r\n0\r\nx-checksum: 1\r\n\r\n" % (size, BODY),
    }.items():
        yield Vector(f"chunks that are right: {name}", head(b"transfer-encoding: chunked") + raw, (200,), kept=True)


def _heads() -> Iterator[Vector]:
    for raw in (
        *(b"GET /live HTTP/1.1\nhost: localhost\n\n", b"GET /live HTTP/1.1\r\nhost: localhost\nx: y\r\n\r\n"),
        *(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\n", b"GET /live HTTP/1.1\r\nhost: localhost\rx: y\r\n\r\n"),
        *(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\rX" + INNER, b"GET /live HTTP/1.1\r\rhost: localhost\r\n\r\n"),
        *(b"GET /live HTTP/1.1\r\n host: localhost\r\n\r\n", b"GET /live HTTP/1.1\r\nhost : localhost\r\n\r\n"),
        *(
            b"GET /live HTTP/1.1\r\nhost: localhost\r\nx: a\r\n b\r\n\r\n",
            b"GET /live HTTP/1.1\r\nhost: localhost\r\n\tx: a\r\n\r\n",
        ),
        *(
            b"GET /live HTTP/1.1\r\nhost: localhost\r\n:\r\nx: y\r\n\r\n",
            b"GET /live HTTP/1.1\r\nhost: localhost\r\n: y\r\n\r\n",
        ),
        *(
            b"GET /live HTTP/1.1\r\nhost: localhost\r\nno colon\r\n\r\n",
            b"GET /live HTTP/1.1\r\nhost: localhost\r\nTe\nst: a\r\n\r\n",
        ),
        *(
            b"GET /live HTTP/1.1\r\nhost: localhost\r\nx: a\0b\r\n\r\n",
            b"GET /live HTTP/1.1\r\nhost: localhost\r\nx\0: b\r\n\r\n",
        ),
        *(
            b"GET /live HTTP/1.1\r\nhost: localhost\r\nx: a\x01\r\n\r\n",
            b"GET /live HTTP/1.1\r\nhost: localhost\r\n\xefx: a\r\n\r\n",
        ),
        *(
            b"GET /live HTTP/1.1\r\nhost: localhost\r\n(x): a\r\n\r\n",
            b"GET /live HTTP/1.1\r\nhost: localhost\r\nx\x85: a\r\n\r\n",
        ),
        *(b"GET /live HTTP/1.1\r\n\r\n", b"GET /live HTTP/1.1\r\nhost: localhost\r\nhost: localhost\r\n\r\n"),
        *(
            b"GET /live HTTP/1.1\r\nhost: localhost\r\nhost: rebound.evil.example\r\n\r\n",
            b"GET /live\r\n\r\n",
            b"GET /live \r\n\r\n",
        ),
        *(b"GET /live HTTP/1.32\r\nhost: localhost\r\n\r\n", b"GET /live HTTP/4294967295.255\r\nhost: localhost\r\n\r\n"),
        *(b"GET /live HTTP/0.9\r\nhost: localhost\r\n\r\n", b"GET /live HTTP/2.0\r\nhost: localhost\r\n\r\n"),
        *(b"GET /live http/1.1\r\nhost: localhost\r\n\r\n", b"GET /live HTTP/1.1 \r\nhost: localhost\r\n\r\n"),
        *(b"GET /live HTTP/\r\r1.1\r\nhost: localhost\r\n\r\n", b"GET /live HTTP/1.1x\r\nhost: localhost\r\n\r\n"),
        *(b"GET\t/live\tHTTP/1.1\r\nhost: localhost\r\n\r\n", b"GET /live\nHTTP/1.1\r\nhost: localhost\r\n\r\n"),
        *(b"get /live HTTP/1.1\r\nhost: localhost\r\n\r\n", b'G=":<>(e),[T];?" /live HTTP/1.1\r\nhost: localhost\r\n\r\n'),
        *(
            b"\0 /live HTTP/1.1\r\nhost: localhost\r\n\r\n",
            b"GET ! HTTP/1.1\r\nhost: localhost\r\n\r\n",
            b"GPOST / HTTP/1.1\r\n\r\n",
        ),
        *(b"GET /live\xff HTTP/1.1\r\nhost: localhost\r\n\r\n", b"GET /li\0ve HTTP/1.1\r\nhost: localhost\r\n\r\n"),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0",
    ):
        yield Vector(f"head {raw[:80]!r}", raw)
    yield Vector("empty lines before a request", b"\r\n\r\nGET /live HTTP/1.1\r\nhost: localhost\r\n\r\n", (200,), kept=True)
    yield Vector("two spaces in the request line", b"GET  /live HTTP/1.1\r\nhost: localhost\r\n\r\n", (200,), kept=True)


def _bodies_that_nobody_reads() -> Iterator[Vector]:
    """CL.0 and TE.0: the answer needs no body; a server that forgets it reads it as the next request. 0.CL with `Expect`."""
    starts = {
        *((b"GET /live HTTP/1.1", 200), (b"GET /v1/models HTTP/1.1", 200), (b"HEAD /live HTTP/1.1", 200)),
        *((b"POST /live HTTP/1.1", 405), (b"POST /nothing HTTP/1.1", 404), (b"DELETE /nothing HTTP/1.1", 404)),
        *((b"PUT /v1/models HTTP/1.1", 405), (b"OPTIONS /nothing HTTP/1.1", 404), (b"POST /%2e%2e/x HTTP/1.1", 404)),
        *((b"POST /static/x.css HTTP/1.1", 404), (b"POST " + PATH.encode() + b" HTTP/1.1", 400)),
    }
    for start, status in sorted(starts):
        plain = [b"content-length: %d" % len(INNER)]
        for lines, body in ((plain, INNER), ([b"transfer-encoding: chunked"], chunked(INNER))):
            for more in ([], [b"expect: 100-continue"], [b"expect: y 100-continue"], [b"range: bytes=0-0"]):
                name = f"unread body: {start!r} {[*lines, *more]!r}"
                yield Vector(name, head(*lines, *more, start=start) + body, (status,), kept=True)
    for lines, status in (
        ([b"origin: https://evil.example"], 403),
        ([b"x-api-key: a", b"x-api-key: b"], 400),
        ([b"content-type: text/plain"], 400),
    ):
        raw = head(b"content-length: %d" % len(INNER), *lines) + INNER
        yield Vector(f"refused before its body {lines!r}", raw, (status,), kept=status != 400)


def _connections() -> Iterator[Vector]:
    n = b"content-length: %d" % len(BODY)
    h2c = [b"connection: Upgrade, HTTP2-Settings", b"upgrade: h2c", b"http2-settings: AAMAAABkAARAAAAAAAIAAAAA"]
    other = [
        b"connection: upgrade",
        b"upgrade: websocket",
        b"sec-websocket-version: 13",
        b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==",
    ]
    for name, offer in (("h2c", h2c), ("websocket", other), ("x", [b"connection: upgrade", b"upgrade: x"])):
        smuggling = head(*offer, b"content-length: %d" % len(INNER)) + INNER
        yield Vector(f"offers {name}: length", head(*offer, n) + BODY, (200,), kept=True)
        yield Vector(f"offers {name}: chunks", head(*offer, b"transfer-encoding: chunked") + chunked(BODY), (200,), kept=True)
        yield Vector(f"offers {name}: CL.0", smuggling, (400,), kept=True)
        yield Vector(f"offers {name}: TE.0", head(*offer, b"transfer-encoding: chunked") + chunked(INNER), (400,), kept=True)
        yield Vector(f"offers {name}: twice", (head(*offer, n) + BODY) * 2, (200, 200), kept=True)
        yield Vector(f"offers {name}: no body", head(*offer, start=b"GET /live HTTP/1.1") + INNER, (200, 404), kept=True)
        yield Vector(
            f"offers {name}: a body of nothing",
            head(*offer, b"content-length: 0", start=b"GET /live HTTP/1.1"),
            (200,),
            kept=True,
        )
        yield Vector(f"offers {name}: another request behind", head(*offer, n) + BODY + INNER, (200, 404), kept=True)
        yield Vector(f"offers {name}: gzip", head(*offer, b"transfer-encoding: gzip") + INNER)
        yield Vector(f"offers {name}: both", head(*offer, n, b"transfer-encoding: chunked") + chunked(INNER))
        yield Vector(f"offers {name}: bad chunk", head(*offer, b"transfer-encoding: chunked") + b"zz\r\n" + INNER)
    yield Vector("CONNECT", head(start=b"CONNECT localhost:80 HTTP/1.1") + INNER, (405,))
    yield Vector("CONNECT with a body", head(n, start=b"CONNECT localhost:80 HTTP/1.1") + BODY, (405,))
    yield Vector("behind close", head(b"connection: close", start=b"GET /live HTTP/1.1") + INNER, (200,))
    old = b"POST " + PATH.encode() + b" HTTP/1.0"
    yield Vector("chunks in HTTP/1.0", head(b"transfer-encoding: chunked", start=old) + chunked(BODY) + INNER, (200,))
    kept = [b"connection: keep-alive", b"transfer-encoding: chunked"]
    yield Vector("chunks in HTTP/1.0, kept", head(*kept, start=old) + chunked(BODY) + INNER, (200,))
    yield Vector("invalid behind valid", head(start=b"GET /live HTTP/1.1") + b"Invalid\r\n\r\n" + INNER, (200, 400))
    yield Vector("a NUL behind chunks", head(b"transfer-encoding: chunked") + chunked(BODY) + b"\0", (200, 400))


FAMILIES: dict[str, tuple[Vector, ...]] = {
    "transfer-encoding": tuple(_encoding_vectors()),
    "plain": tuple(_plain_encodings()),
    "content-length": tuple(_lengths()),
    "chunks": tuple(_chunks()),
    "heads": tuple(_heads()),
    "unread bodies": tuple(_bodies_that_nobody_reads()),
    "connections": tuple(_connections()),
}
