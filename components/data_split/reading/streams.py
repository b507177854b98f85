"""Files as streams of bytes and lines, unpacked on the way, in memory that does not grow with the file."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import zlib
from collections.abc import Generator, Iterable, Iterator
from typing import Any, NamedTuple

from baton.components.data_split.rows import MAX_ROW, SHOWN, UnreadableError
from baton.components.shared.store.sources import SourceFile

BLOCK = 2**20
"""Bytes read at once."""

ZSTD_BLOCK = 2**9
"""Bytes unpacked at once by zstd, which has no limit on what comes out: 128 KiB for each 4 bytes at the most."""

PACKINGS = {
    ".gz": (b"\x1f\x8b\x08",),
    ".bz2": (b"BZh",),
    ".xz": (b"\xfd7zXZ\x00",),
    ".zst": (b"\x28\xb5\x2f\xfd", *(bytes([first]) + b"\x2a\x4d\x18" for first in range(0x50, 0x60))),
}
"""What a packed file begins with; zstd's second kind is a frame to be skipped, which parallel packers write first."""


MARKS = (
    (b"\xff\xfe\0\0", "utf-32"),
    (b"\0\0\xfe\xff", "utf-32"),
    (b"\xff\xfe", "utf-16"),
    (b"\xfe\xff", "utf-16"),
)
"""First bytes of a text that is not UTF-8, and its encoding."""


class Line(NamedTuple):
    """A line with its end, or the first bytes of one that is longer than a row may be."""

    number: int
    data: bytes
    too_long: bool = False


def packing(path: str, head: bytes) -> str | None:
    """Returns how a file is packed, `.gz`, `.bz2`, `.xz` or `.zst`, by its first bytes; None where it is not.

    Raises:
        UnreadableError: it has the name of a packed file and does not begin like one.
    """
    for kind, signs in PACKINGS.items():
        named = path.lower().endswith(kind)
        if head.startswith(signs) and (named or kind != ".bz2" or head[4:8] == b"1AY&"):  # a text may begin with BZh
            return kind
        if named and head:
            raise UnreadableError(f"cannot be decompressed: it does not begin like {kind[1:]}")
    return None


def blocks(file: SourceFile) -> Generator[bytes, None, None]:
    """Yields a file's bytes, unpacked.

    Raises:
        UnreadableError: the packed file breaks off, or is not what it should be; all before that was yielded.
    """
    with file.storage.translated(file.path), file.storage.fs.open(file.storage.key(file.path), "rb") as opened:
        head = opened.read(8)
        opened.seek(0)
        kind = packing(file.path, head)
        if kind is None:
            yield from iter(lambda: opened.read(BLOCK), b"")
            return
        unpack = _unzstd(opened) if kind == ".zst" else _unpack(opened, kind)
        while block := _next(unpack):
            yield block


def _next(unpack: Iterator[bytes]) -> bytes:
    import zstandard

    try:
        return next(unpack, b"")
    except (EOFError, OSError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
        if getattr(error, "errno", None):  # of the store, not of the content
            raise
        raise UnreadableError(f"cannot be decompressed: {error}") from None


def _unpack(opened: Any, kind: str) -> Iterator[bytes]:
    unpacker: Any = {".gz": lambda file: gzip.GzipFile(fileobj=file), ".bz2": bz2.BZ2File, ".xz": lzma.LZMAFile}[kind]
    unpacked = unpacker(opened)
    return iter(lambda: unpacked.read1(BLOCK), b"")  # read1: what comes before damage is returned


def _unzstd(opened: Any) -> Iterator[bytes]:
    """Unpacks frames; the library's own stream reader takes a file that breaks off for one that ends."""
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=2**27)
    frame, data, began = decompressor.decompressobj(), b"", False
    while data := data or opened.read(ZSTD_BLOCK):
        unpacked = frame.decompress(data)
        began, data = True, b""
        if frame.eof:
            data, frame, began = frame.unused_data, decompressor.decompressobj(), False
        if unpacked:
            yield unpacked
    if began:
        raise EOFError("Compressed file ended before the end of a frame")


def marked(head: bytes) -> str | None:
    """Returns the encoding that a text states by its first bytes, None where that is UTF-8 or nothing."""
    return next((encoding for mark, encoding in MARKS if head.startswith(mark)), None)


def text_blocks(stream: Iterable[bytes], encoding: str | None = None) -> Iterator[bytes]:
    """Yields a text as UTF-8, without the mark it may begin with.

    Characters that are none remain bytes that are not UTF-8, so that only their row is lost.

    Args:
        stream: Its bytes.
        encoding: Its encoding, where the first bytes state none; UTF-8 when left out.

    Raises:
        UnreadableError: it breaks off within a character, or holds what its encoding does not have.
    """
    decoder: codecs.IncrementalDecoder | None = None
    errors = "surrogateescape"
    try:
        for position, block in enumerate(stream):
            if position == 0 and (encoding := marked(block) or encoding):
                errors = "surrogatepass" if "utf-" in codecs.lookup(encoding).name else errors
                if codecs.lookup(encoding).name not in ("utf-8", "utf-8-sig"):
                    decoder = codecs.getincrementaldecoder(encoding)(errors)
            if decoder:
                yield decoder.decode(block).encode("utf-8", errors).removeprefix(b"" if position else b"\xef\xbb\xbf")
            else:
                yield block if position else block.removeprefix(b"\xef\xbb\xbf")
        if decoder:
            yield decoder.decode(b"", final=True).encode("utf-8", errors)
    except UnicodeError as error:
        raise UnreadableError(f"not {encoding}: {error}") from None


def lines(stream: Iterable[bytes], end: bytes = b"\n") -> Iterator[Line]:
    """Yields the lines of a text, each with its end.

    Args:
        stream: Its bytes.
        end: Byte that ends a line.

    Raises:
        UnreadableError: the text breaks off; with the number of the line and what was read of it.
    """
    number, size, parts = 1, 0, io.BytesIO()

    def taken(more: bytes) -> None:
        nonlocal size
        room = (MAX_ROW if size + len(more) <= MAX_ROW else SHOWN) - parts.tell()
        parts.write(more[: max(room, 0)])
        size += len(more)

    def line() -> Line:
        return Line(number, parts.getvalue()[: MAX_ROW if size <= MAX_ROW else SHOWN], size > MAX_ROW)

    try:
        for block in stream:
            *whole, last = block.split(end)
            for piece in whole:
                if size or len(piece) >= MAX_ROW:
                    taken(piece + end)
                    yield line()
                    size, parts = 0, io.BytesIO()
                else:
                    yield Line(number, piece + end)
                number += 1
            taken(last)
    except UnreadableError as error:
        raise UnreadableError(error.reason, number, error.raw or line().data) from None
    if size:
        yield line()
