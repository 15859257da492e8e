"""What is wrong with a file that cannot be read as text, from its first bytes."""

import contextlib

NUL = "it contains NUL bytes, so it is binary, or text in UTF-16: convert it with iconv -f UTF-16 -t UTF-8"
_EXTRACT, _DECOMPRESS = "extract its text first", "decompress it first"
# The first bytes of files that are often mistaken for text, what such a file is, and what to do with it.
_SIGNATURES = (
    (b"%PDF-", "a PDF", _EXTRACT),
    (b"PK\x03\x04", "a ZIP archive, or a document such as .docx, .xlsx or .odt", _EXTRACT),
    (b"\xd0\xcf\x11\xe0", "an old Office document", _EXTRACT),
    (b"{\\rtf", "an RTF document", _EXTRACT),
    (b"\x1f\x8b", "compressed with gzip", "let its name end in .gz"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", "let its name end in .zst"),
    (b"BZh91AY", "compressed with bzip2", _DECOMPRESS),
    (b"\xfd7zXZ", "compressed with xz", _DECOMPRESS),
    (b"7z\xbc\xaf", "a 7z archive", _EXTRACT),
    (b"PAR1", "a Parquet file", "let its name end in .parquet"),
    (b"ARROW1", "an Arrow file", "convert it to .parquet"),
    (b"\xff\xfe", "text in UTF-16", "convert it with iconv -f UTF-16 -t UTF-8"),
    (b"\xfe\xff", "text in UTF-16", "convert it with iconv -f UTF-16 -t UTF-8"),
)
_EXPECTED = {"gzip": b"\x1f\x8b", "zstd": b"\x28\xb5\x2f\xfd", ".parquet": b"PAR1"}


def describe_bad_file(path: str, kind: str, compression: str | None) -> str | None:
    """Return what a file looks like and what to do with it, or None if it looks as its name says.

    kind, compression: according to its name.
    """
    head = b""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        head = file.read(8)
    expected = _EXPECTED.get(compression or kind)
    if expected and head.startswith(expected):
        return None
    for signature, what, remedy in _SIGNATURES:
        if head.startswith(signature):
            return f"it is {what}; {remedy}"
    if compression and head:
        return f"it is not compressed with {compression}, as its name says; remove {path[path.rindex('.') :]} from it"
    return None
