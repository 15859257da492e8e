"""Markdown whose structure no text or number can break."""

import math
import re
import shlex
from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]], align: str = "left") -> str:
    """Return a table; `align` is that of all columns but the first."""
    rule = ["---"] + ["---:" if align == "right" else "---"] * (len(header) - 1)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (header, rule, *rows))


def fence(text: str, language: str) -> str:
    """Return a code block that nothing in the text can end."""
    marks = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{marks}{language}\n{text}\n{marks}\n"


def command_block(command: str, width: int = 90) -> str:
    """Return a block with a shell command, wrapped between options."""
    lines = [""]
    for word in shlex.split(command):
        if word.startswith("--") and len(lines[-1]) + len(word) > width - 20:
            lines[-1] += "\\"
            lines.append("    ")
        lines[-1] += shlex.quote(word) + " "
    return fence("\n".join(line.rstrip(" ") for line in lines), "bash")


def plain(text: str) -> str:
    """Return a text that Markdown shows as it is, in one line."""
    return re.sub(r"([\\`*_{}\[\]<>|#~&$])", r"\\\1", " ".join(str(text).split()))


def number(value: object, style: str) -> str:
    """Format a number; one that is missing or not finite is a dash."""
    return f"{value:{style}}" if is_finite(value) else "-"


def is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
