"""The demo's corpus: what every Python comes with."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

from recipe.errors import UserError


def read_standard_library() -> Iterator[str]:
    """The Python standard library as installed: its reference documentation, then its sources without tests.

    Raises `UserError` where the interpreter ships without sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "pydoc_data", "encodings"}
    # (encodings are tables of character names)
    sources = sorted(p for p in root.rglob("*.py") if not skipped & set(p.relative_to(root).parts))
    if len(sources) < 50:
        raise UserError(
            f"this Python has no library sources in {root} to train the demo on; "
            "pass --train_file TEXT.txt with any text of a megabyte or more"
        )
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave the documentation out; the sources alone will do
        topics = {}
    yield from (text for _, text in sorted(topics.items()))
    for path in sources:
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # a few sources are not UTF-8 on purpose
        if text.strip():
            yield text
