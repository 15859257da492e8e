"""Compare the ids of the recipe's encoder with those of tokenizers, on as much and as diverse text as wanted.

python scripts/benchmarks/encoder_equality.py --tokenizer_name DIR ... --text FOLDER ... --megabytes 1000 200 \
    --output_file scripts/benchmarks/encoder_equality_cpu.json

The given text is UTF-8, plain or compressed by gzip; each argument is a kind of text. To it come two synthetic kinds:
every code point of Unicode in several contexts, and random mixes of what tokenizers may disagree on. All kinds get the
same share. No document is encoded twice. Four threads encode at the same time; a forked and a spawned process follow.
"""

import base64
import functools
import gzip
import hashlib
import itertools
import multiprocessing
import os
import random
import time
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from recipe.arguments import CommandLine
from recipe.benchmark.measure import finish_results
from recipe.data.encoder import build_text_encoder, has_recent_characters
from recipe.data.tokenizer import TextTokenizer, read_tokenizer
from recipe.errors import UserError, run_main

NUM_THREADS, BATCH_DOCUMENTS, DOCUMENT_CHARACTERS = 4, 20, 1_000_000  # longer files are cut
CONTEXTS = ("{0}'s", "a{0}b", " {0} ", "1{0}2", "{0}{0}", "A{0}.")
BLANKS = (" ", "\t", "\n", "\r\n", "\r", "\x0b", "\x0c", "\x85", "\u00a0", "\u2028", "\u3000", " \n", "\n ")
PIECES = [*BLANKS, "\u200d", "\u200b", "\ufe0f", "\u20e3", "\ufeff", "\ufffd", "\ufffe", "\uffff", "\U0010ffff"]


def main() -> None:
    parser = CommandLine(description="Compare the encoder's ids with those of tokenizers.")
    parser.add_argument("--tokenizer_name", nargs="+", required=True, help="tokenizer folders or Hub ids")
    parser.add_argument("--text", nargs="+", default=[], metavar="PATH", help="files and folders of text")
    parser.add_argument(
        "--megabytes", type=int, nargs="+", default=[1000], help="of distinct text for each tokenizer; default: 1000"
    )
    parser.add_argument("--output_file", type=Path, help="JSON to write")
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # so that a thread's time is that of its documents
    megabytes = args.megabytes + args.megabytes[-1:] * len(args.tokenizer_name)
    tokenizers = {
        Path(name).name: compare_tokenizer(name, args.text, size)
        for name, size in zip(args.tokenizer_name, megabytes, strict=False)
    }
    finish_results({"tokenizers": tokenizers}, args.output_file)


def compare_tokenizer(name: str, texts: list[str], megabytes: int) -> dict:
    """Compare all ids. Returns the amounts for each kind of text, and the speed of both encoders."""
    tokenizer, encode = load(name)
    kinds = {path: read_documents(path) for path in texts}
    kinds |= {"every code point": every_code_point(), "random": random_documents(tokenizer, seed=0)}
    documents = take_documents(kinds, megabytes * 1_000_000)
    counts: dict[str, Counter] = defaultdict(Counter)
    seconds = np.zeros(2)
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        while some := list(itertools.islice(documents, NUM_THREADS * BATCH_DOCUMENTS)):
            batches = [some[i : i + BATCH_DOCUMENTS] for i in range(0, len(some), BATCH_DOCUMENTS)]
            for of_documents, of_batch in threads.map(functools.partial(compare, tokenizer, encode), batches):
                seconds += of_batch
                for kind, amounts in of_documents:
                    counts[Path(kind).name].update(amounts)
            num_bytes = sum(count["bytes"] for count in counts.values())
            print(f"\r{name}: {num_bytes / 1e6:,.0f} MB are equal", end="", flush=True)
    compare_processes(name)
    print()
    rates = dict(zip(("gigatoken", "tokenizers"), (num_bytes / 1e6 / seconds).round(1).tolist(), strict=True))
    return {"vocab_size": len(tokenizer), "kinds": counts, "bytes": num_bytes, "megabytes_per_cpu_second": rates}


def compare(
    tokenizer: TextTokenizer, encode: Callable, batch: list[tuple[str, str]]
) -> tuple[list[tuple[str, dict]], list[float]]:
    """Count each document's bytes and tokens, and the CPU seconds of both encoders.

    Raises `UserError` with the shortest example if ids differ.
    """

    def differs(text: str) -> bool:
        return encode([text])[0].tolist() != tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids

    texts = [text for _, text in batch]
    times = [time.thread_time()]
    ids, lengths = encode(texts)
    times.append(time.thread_time())
    expected = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    times.append(time.thread_time())
    counts = []
    for (kind, text), found, encoding in zip(batch, np.split(ids, np.cumsum(lengths)[:-1]), expected, strict=True):
        if not np.array_equal(found, encoding.ids):
            raise UserError(f"the ids differ in a document of kind {kind}; shortened: {ascii(shorten(text, differs))}")
        amounts = {"documents": 1, "bytes": len(text.encode()), "tokens": len(found)}
        counts.append((kind, amounts | {"not by gigatoken": int(has_recent_characters([text]))}))
    return counts, np.diff(times).tolist()


def shorten(text: str, is_wrong: Callable[[str], bool]) -> str:
    """Remove what can be removed from a text that stays wrong."""
    size = len(text)
    while size := size // 2:
        start = 0
        while start < len(text):
            rest = text[:start] + text[start + size :]
            text, start = (rest, start) if is_wrong(rest) else (text, start + size)
    return text


def compare_processes(tokenizer_name: str) -> None:
    """Compare this process's ids with those of a forked process, which inherits the encoder, and of a spawned one."""
    tokenizer, encode = load(tokenizer_name)
    texts = list(itertools.islice(random_documents(tokenizer, seed=1), 200))
    for method in ("fork", "spawn"):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as processes:
            ids = processes.submit(encode_in_process, tokenizer_name, texts).result()
        if not np.array_equal(ids, encode(texts)[0]):
            raise UserError(f"the ids differ in a process made by {method}")


def encode_in_process(tokenizer_name: str, texts: list[str]) -> np.ndarray:
    return load(tokenizer_name)[1](texts)[0]


@functools.cache
def load(tokenizer_name: str) -> tuple[TextTokenizer, Callable]:
    """Raises `UserError` if the recipe would not encode with gigatoken."""
    tokenizer = read_tokenizer(tokenizer_name)
    encode, how = build_text_encoder(tokenizer, [])
    if not how.startswith("gigatoken"):
        raise UserError(f"the recipe would encode with {how}")
    return tokenizer, encode


def take_documents(kinds: dict[str, Iterator[str]], num_bytes: int) -> Iterator[tuple[str, str]]:
    """Yield distinct documents as (kind, text), always of the kind with the fewest bytes so far."""
    taken, seen = dict.fromkeys(kinds, 0), set()
    while kinds and sum(taken.values()) < num_bytes:
        kind = min(kinds, key=taken.__getitem__)
        text = next(kinds[kind], None)
        if text is None:
            del kinds[kind]
            continue
        content = text.encode()
        digest = hashlib.blake2b(content, digest_size=16).digest()
        if content and digest not in seen:
            seen.add(digest)
            taken[kind] += len(content)
            yield kind, text


def read_documents(path: str) -> Iterator[str]:
    """Yield the text of a file or of a folder's files in random order, except those that are not UTF-8."""
    if not Path(path).exists():
        raise UserError(f"there is no file or folder {path}")
    walk = os.walk(path, followlinks=True)
    files = sorted(Path(folder, name) for folder, _, names in walk for name in names) or [Path(path)]
    random.Random(0).shuffle(files)
    for file in files:
        try:
            content = file.read_bytes()
            text = (gzip.decompress(content) if file.suffix == ".gz" else content).decode("utf-8")
        except (OSError, EOFError, ValueError):  # a broken link or archive, or not text
            continue
        for start in range(0, len(text), DOCUMENT_CHARACTERS):
            yield text[start : start + DOCUMENT_CHARACTERS]


def every_code_point() -> Iterator[str]:
    for start in range(0, 0x110000, 1024):
        characters = [chr(code) for code in range(start, start + 1024) if not 0xD800 <= code < 0xE000]
        for context in CONTEXTS:
            yield "\n".join(context.format(character) for character in characters)


def random_documents(tokenizer: TextTokenizer, seed: int) -> Iterator[str]:
    """Yield texts of 1 to 60 parts, without end. A part is random characters of a class, a run, or a special token."""
    rng, classes = random.Random(seed), defaultdict(list)
    for character in map(chr, itertools.chain(range(0xD800), range(0xE000, 0x110000))):
        category = unicodedata.category(character)
        if category != "Cn":  # assigned
            classes[category].append(character)
            classes[unicodedata.name(character, "?").split()[0]].append(character)  # mostly the script
    classes["?"] = PIECES
    classes["emoji"] = [*map(chr, range(0x1F1E6, 0x1FB00)), "\u200d", "\ufe0f", "\u20e3", "\U0001f3fd"] * 2
    classes["contraction"] = ["'", "\u2019", *"sSdDmMtTlLvVrReE ", "\u017f", "'s", "'LL", "'Ve", "'re", "a", "\u00e9"]
    names, special = sorted(classes), list(tokenizer.backend_tokenizer.get_added_tokens_decoder().values())
    makers = [
        lambda: "".join(rng.choices(classes[rng.choice(names)], k=rng.randint(1, 20))),
        lambda: " ".join("".join(rng.choices(classes[rng.choice(names)], k=rng.randint(1, 8))) for _ in range(8)),
        lambda: "".join(rng.choice(classes[rng.choice(names)]) for _ in range(rng.randint(1, 30))),
        lambda: "".join(rng.choices(classes["contraction"], k=rng.randint(1, 20))),
        lambda: unicodedata.normalize(
            rng.choice(["NFD", "NFKC"]), rng.choice(classes["Lo"]) + rng.choice("\u0301\u0327")
        ),
        lambda: rng.choice(PIECES) * int(10 ** rng.uniform(0, 2)),
        lambda: str(rng.getrandbits(rng.randint(1, 200))),
        lambda: base64.b64encode(rng.randbytes(rng.randint(1, 100))).decode(),
        lambda: rng.choice(special).content[rng.choice([0, 0, 1]) :],
    ]
    for number in itertools.count():
        parts = [rng.choice(makers)() for _ in range(rng.randint(1, 60))]
        if number % 50 == 0:  # a long run
            run = rng.choice([*BLANKS, *"aA0.-_\u732b\U0001f600"]) * int(10 ** rng.uniform(2, 6))
            parts.insert(rng.randrange(len(parts) + 1), run)
        yield rng.choice(["", "", " ", "\n"]).join(parts)


if __name__ == "__main__":
    run_main(main)
