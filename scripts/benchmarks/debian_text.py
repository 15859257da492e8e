"""Collect some 60 MB of English text from Debian packages, for experiments that need more than the demo's corpus.

python scripts/benchmarks/debian_text.py --output_dir runs/debian_text

A book on anarchism (its authors' FAQ), the documentation of the kernel, Perl, Python and git, and two dictionaries of
computing, as one text file per package. Requires apt-get and dpkg-deb; nothing is installed.
"""

import gzip
import subprocess
import tempfile
from pathlib import Path

from recipe.arguments import CommandLine
from recipe.errors import UserError, run_main

FILES = {  # of each package: the text files in it
    "anarchism": "*.md.gz",
    "dict-foldoc": "*.dict.dz",
    "dict-jargon": "*.dict.dz",
    "git-doc": "*.txt",
    "linux-doc-6.1": "*.rst.gz",
    "perl-doc": "*.pod",
    "python3.11-doc": "*.txt",
}


def main() -> None:
    parser = CommandLine(description="Collect English text from Debian packages.")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/debian_text"), help="default: runs/debian_text")
    parser.add_argument("--packages", nargs="+", choices=list(FILES), default=list(FILES), help="default: all")
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    for package in args.packages:
        with tempfile.TemporaryDirectory() as folder:
            run(["apt-get", "download", "-qq", package], folder)
            (archive,) = Path(folder).glob("*.deb")
            run(["dpkg-deb", "-x", archive.name, "unpacked"], folder)
            paths = sorted(path for path in Path(folder, "unpacked").rglob(FILES[package]) if path.is_file())
            texts = [read_text(path) for path in paths]
        target = args.output_dir / f"{package}.txt"
        target.write_text("\n".join(texts), encoding="utf-8")
        print(f"{target}: {len(texts):,} files, {target.stat().st_size / 1e6:.1f} MB")


def read_text(path: Path) -> str:
    content = path.read_bytes()
    if path.suffix in (".gz", ".dz"):
        content = gzip.decompress(content)
    return content.decode("utf-8", errors="replace")


def run(command: list[str], folder: str) -> None:
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    except FileNotFoundError as error:
        raise UserError(f"{command[0]} is not installed; this program needs Debian or Ubuntu") from error
    except subprocess.CalledProcessError as error:
        reason = error.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise UserError(f"{' '.join(command)} failed: {reason}") from error


if __name__ == "__main__":
    run_main(main)
