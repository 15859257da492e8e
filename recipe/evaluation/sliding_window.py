"""Loss, perplexity, bits per byte and per character of any text, with a sliding window.

The first window of a document scores up to `context` tokens. Each further one moves by `stride` tokens and scores
only those, so they see at least context - stride tokens before them. Every token is scored exactly once.
"""

import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir

import numpy as np
from accelerate import PartialState
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from recipe.data.documents import Piece
from recipe.data.encoder import build_text_encoder, join_pieces
from recipe.data.files import ReadReport, expand_paths, kind_of, read_file
from recipe.data.packed import PackedDataset
from recipe.data.tokenizer import tokenizer_sha256
from recipe.errors import UserError
from recipe.evaluation.scoring import Row, make_batches, score_batch, show_progress
from recipe.hardware.host_memory import FreedMemory
from recipe.hardware.processes import gather

ENCODED_DOCUMENTS = 1000  # per call of the encoder


@dataclass(frozen=True)
class TokenizedText:
    """A text as sequences of token ids. The first token of each sequence is context; all others are scored."""

    name: str
    tokens: np.ndarray  # the sequences, one after the other: int [tokens]
    starts: np.ndarray  # where each sequence begins, and the end of the last one: int64 [sequences + 1]
    num_documents: int | None
    num_bytes: int
    num_characters: int | None

    @property
    def num_targets(self) -> int:
        return len(self.tokens) - len(self.starts) + 1

    def head(self, num_tokens: int) -> "TokenizedText":
        """Return the beginning of the text; its bytes are estimated from its share of the tokens."""
        starts = np.append(
            self.starts[self.starts < min(num_tokens, len(self.tokens))], min(num_tokens, len(self.tokens))
        )
        num_bytes = max(1, round(self.num_bytes * starts[-1] / len(self.tokens)))
        return TokenizedText(self.name, self.tokens[: starts[-1]], starts, None, num_bytes, None)


def read_text(
    given: str, tokenizer: PreTrainedTokenizerBase, text_column_name: str = "text", separator: str | None = None
) -> TokenizedText:
    """Read and encode a file, a folder or a glob pattern. An end-of-text token precedes each document, unscored.

    Raises `UserError` if there is no text, or if it cannot be read.
    """
    paths = expand_paths([given])
    for path in paths:
        kind_of(path)  # raises for an unsupported kind
    parts = (part for path in paths for part in read_file(path, text_column_name, separator, ReadReport()))
    pieces = (Piece("validation", _require_text(text, given), ends) for text, ends, _ in parts)
    texts = [piece.text for piece in join_pieces(pieces)]
    if not texts:
        raise UserError(f"there is no text in {given}")
    encode, _ = build_text_encoder(copy.deepcopy(tokenizer), texts[:10])  # it changes the tokenizer
    tokens, lengths = [], []
    for start in range(0, len(texts), ENCODED_DOCUMENTS):
        ids, counts = encode(texts[start : start + ENCODED_DOCUMENTS])
        tokens.append(np.insert(ids, np.cumsum(counts) - counts, tokenizer.eos_token_id))
        lengths.append(counts + 1)
    starts = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
    num_bytes, num_characters = (sum(map(len, found)) for found in ((text.encode() for text in texts), texts))
    return TokenizedText(Path(given).name, np.concatenate(tokens), starts, len(texts), num_bytes, num_characters)


def _require_text(text: str | np.ndarray, given: str) -> str:
    if not isinstance(text, str):
        raise UserError(f"{given} is already tokenized; evaluate text, or a packed dataset with --dataset_dir")
    return text


def read_validation_split(dataset: PackedDataset, tokenizer: PreTrainedTokenizerBase) -> TokenizedText:
    """Take the validation stream of a packed dataset as it was packed: documents joined by end-of-text tokens.

    With stride = context = block_size, its loss is that of the training run's exact evaluation. Raises `UserError` if
    another tokenizer made the dataset.
    """
    if dataset.metadata["tokenizer_sha256"] != tokenizer_sha256(tokenizer):
        remedy = "evaluate the text itself with --text_file, or prepare the dataset with the model's tokenizer"
        raise UserError(f"{dataset.directory} was tokenized with another tokenizer than the model's; {remedy}")
    split = dataset.splits["validation"]
    for rows in split.chunks:
        split.check(rows)
    starts = np.cumsum([0, *(len(rows) * dataset.block_size + 1 for rows in split.chunks)])
    counts = dataset.metadata["splits"]["validation"]
    # The rows may lack the last tokens of the split, so their share of its bytes is estimated from their tokens.
    num_bytes = round((starts[-1] - len(split.chunks)) / dataset.tokens_per_byte("validation"))
    name = f"{dataset.directory.absolute().name} validation"
    return TokenizedText(name, split.stream(), starts, counts.get("documents"), num_bytes, None)


def cut_windows(starts: np.ndarray, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, end, number of targets) of each window; it holds at most context + 1 tokens."""
    for first, last in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        position, count = first + 1, context  # the next target
        while position < last:
            end = min(position + count, last)
            yield max(first, end - 1 - context), end, end - position
            position, count = end, stride


def evaluate_text(
    model: PreTrainedModel, text: TokenizedText, context: int, stride: int, tokens_per_batch: int
) -> dict[str, float | int | str | None]:
    """Return loss (nats per token), perplexity, bits_per_byte, bits_per_character, the counts and seconds.

    The processes divide the windows. The softmax is over the model's whole vocabulary.
    """
    from recipe.evaluation.perplexity import LanguageModelingMetric  # importing evaluate takes seconds

    started_at, state, freed_memory = time.perf_counter(), PartialState(), FreedMemory()
    windows = np.array(list(cut_windows(text.starts, context, stride)))
    batches = make_batches(windows[:, 1] - windows[:, 0], tokens_per_batch)
    mine, loss_sum = batches[state.process_index :: state.num_processes], 0.0
    for batch in show_progress(mine, text.name, "batch", len(mine)):
        rows = [Row(text.tokens[begin:end].astype(np.int64), count) for begin, end, count in windows[batch]]
        loss_sum -= sum(score.log_probability for score in score_batch(model, model.config.vocab_size, rows))
        freed_memory.give_back()
    metric = LanguageModelingMetric(keep_in_memory=True, cache_dir=gettempdir())
    scores = metric.compute(
        predictions=[sum(gather(loss_sum))],
        references=[text.num_targets],
        tokens_per_byte=text.num_targets / text.num_bytes,
        tokens_per_character=text.num_targets / text.num_characters if text.num_characters else None,
    )
    return {
        "name": text.name,
        "bits_per_character": None,
        **scores,
        "num_tokens": text.num_targets,
        "num_bytes": text.num_bytes,
        "num_characters": text.num_characters,
        "num_documents": text.num_documents,
        "context": context,
        "stride": stride,
        "seconds": time.perf_counter() - started_at,
    }
