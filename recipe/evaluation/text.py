"""Loss, perplexity, bits per byte and bits per character of a saved model, over any text or a packed dataset.

A window slides over each document of a text. The first one scores up to `context` tokens. Each further one moves by
`stride` tokens and scores only those, so they see at least context - stride tokens before them. Every token is scored
exactly once.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from recipe.checkpoint import STATE_NAME
from recipe.data.packed import PackedDataset, bytes_per_token
from recipe.data.read import read_texts
from recipe.data.tokenizer import document_start, special_tokens, text_ids, tokenizer_sha256
from recipe.errors import UserError
from recipe.evaluation.scoring import Totals, Window, batch_windows, pad_windows, sum_losses
from recipe.evaluation.validation import evaluate_rows
from recipe.model.loss import own_losses
from recipe.publish.public import read_options

ENCODED_DOCUMENTS = 1000  # at a time, because tokenizers needs hundreds of bytes of memory per token
LONGEST_CONTEXT = 4096  # unless --context sets it: the logits of 131,072 positions and 128,000 tokens take 67 GB


@dataclass(frozen=True)
class Text:
    """Documents as token ids, int64 [tokens].

    Each begins with the id that precedes documents in training, which is context and never scored.
    """

    name: str
    documents: list[np.ndarray]
    num_characters: int
    num_bytes: int


def read_text(
    path: str,
    tokenizer: PreTrainedTokenizerFast,
    text_column_name: str = "text",
    document_separator: str | None = None,
    max_characters: int | None = None,
) -> Text:
    """Read and encode a file, a folder or a glob pattern. Raises `UserError` if there is no text, or no access to it.

    max_characters: only the beginning.
    """
    texts = []
    num_characters = 0
    for text in read_texts([path], text_column_name, document_separator):
        texts.append(text if max_characters is None else text[: max_characters - num_characters])
        num_characters += len(texts[-1])
        if num_characters == max_characters:
            break
    if not texts:
        raise UserError(f"there is no text in {path}")
    documents = []
    before = document_start(tokenizer)[-1]
    num_bytes = sum(len(text.encode()) for text in texts)
    # Special tokens in a text are characters, unless the model was trained with --parse_special_tokens.
    options = {"split_special_tokens": tokenizer.init_kwargs.get("split_special_tokens", True)}
    special = {} if options["split_special_tokens"] else special_tokens(tokenizer)  # parsed ones are no text
    for start in range(0, len(texts), ENCODED_DOCUMENTS):
        batch = texts[start : start + ENCODED_DOCUMENTS]
        encoded = tokenizer(batch, add_special_tokens=False, verbose=False, **options)["input_ids"]
        if special:
            found = "".join(special[index] for ids in encoded for index in ids if index in special)
            num_characters -= len(found)
            num_bytes -= len(found.encode())
        documents += [np.array(ids if ids[:1] == [before] else [before, *ids]) for ids in encoded]
    return Text(Path(path).name, documents, num_characters, num_bytes)


def choose_context(model: Path | str, num_positions: int, typed: int | None) -> tuple[int, int, str]:
    """Return the context for texts and the length of a dataset's rows, in tokens, and where the length comes from.

    By default, rows are as long as in the model's own run, if its folder, or that of a checkpoint's run, holds that
    run's config. Raises `UserError` if a typed context does not fit the model.
    """
    if typed is not None:
        if not 1 <= typed <= num_positions:
            raise UserError(f"context must be from 1 to {num_positions:,}, the positions of {model}, got {typed:,}")
        return typed, typed, "--context"
    context = min(num_positions, LONGEST_CONTEXT)
    folder = Path(model).absolute()
    options = read_options(folder.parent if (folder / STATE_NAME).is_file() else folder)
    if (block_size := options.get("block_size")) is not None:
        return context, block_size, "the run's block_size"
    return context, context, "the model's positions" if context == num_positions else "the default"


def cut_windows(ids: np.ndarray, context: int, stride: int) -> Iterator[Window]:
    """Yield windows of at most context + 1 tokens; every token but the first is the target of exactly one."""
    position = 1  # of the next target
    count = context
    while position < len(ids):
        end = min(position + count, len(ids))
        yield Window(ids[max(0, end - 1 - context) : end], end - position)
        position = end
        count = stride


def evaluate_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    text: Text,
    context: int,
    stride: int,
    tokens_per_batch: int,
) -> dict[str, Any]:
    """Return loss (nats per token), perplexity, bits_per_byte, bits_per_character, the counts and seconds.

    The processes divide the windows.
    """
    started_at = time.perf_counter()
    state = PartialState()
    windows = [window for document in text.documents for window in cut_windows(document, context, stride)]
    batches = batch_windows([len(window.ids) for window in windows], tokens_per_batch)
    mine = batches[state.process_index :: state.num_processes]
    padded = (pad_windows([windows[i] for i in batch], model.device) for batch in mine)
    totals = sum_losses(*_scorer(model, tokenizer), padded, len(mine), text.name)
    assert totals is not None  # nothing asks it to stop
    bits = totals.text_nats / math.log(2)
    return {
        "name": text.name,
        **_scores(totals, text.num_bytes),
        "bits_per_character": bits / text.num_characters,
        "num_characters": text.num_characters,
        "num_documents": len(text.documents),
        "context": context,
        "stride": stride,
        "seconds": time.perf_counter() - started_at,
    }


def evaluate_dataset(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    dataset: PackedDataset,
    batch_size: int,
    max_rows: int | None = None,
) -> dict[str, Any]:
    """Return the scores of validation rows, each with at most block_size tokens of context, as in the training run.

    max_rows: rows spread evenly over the split; all by default. Raises `UserError` if another tokenizer made the
    dataset.
    """
    if dataset.metadata["tokenizer_sha256"] != tokenizer_sha256(tokenizer):
        remedy = "evaluate the text itself with --text_file, or prepare the dataset for this model"
        raise UserError(f"{dataset.directory} was tokenized with another tokenizer than the model's; {remedy}")
    started_at = time.perf_counter()
    rows = dataset.validation
    size = bytes_per_token(dataset)
    num_rows = min(len(rows), max_rows or len(rows))
    totals = evaluate_rows(*_scorer(model, tokenizer), rows, num_rows, batch_size)
    assert totals is not None  # nothing asks it to stop
    return {
        "name": f"{', '.join(dataset.parts or [dataset.directory.absolute().name])} validation",
        **_scores(totals, totals.num_bytes(size)),
        "bits_per_character": None,
        "context": dataset.block_size,
        "stride": dataset.block_size,
        "seconds": time.perf_counter() - started_at,
    }


def _scorer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> tuple[Callable, torch.Tensor]:
    """Return the losses, and which tokens are text, as `sum_losses` takes them."""
    return functools.partial(own_losses, model), torch.from_numpy(text_ids(tokenizer)).to(model.device)


def _scores(totals: Totals, num_bytes: float | None) -> dict[str, Any]:
    from recipe.evaluation.perplexity import LanguageModelingMetric  # importing evaluate takes seconds

    scores = LanguageModelingMetric().compute(
        predictions=[totals.nats],
        references=[totals.num_tokens],
        text_nats=totals.text_nats,
        num_bytes=num_bytes,
    )
    assert scores is not None  # None is for the other processes of a shared metric
    return {**scores, "num_tokens": totals.num_tokens, "num_bytes": None if num_bytes is None else round(num_bytes)}
