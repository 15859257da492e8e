"""Zero-shot scores on HellaSwag and LAMBADA, by the rules of EleutherAI's lm-evaluation-harness 0.4.

The examples come from a local .jsonl file of their public schema or from the Hub. A continuation is scored by the sum
of the log-probabilities of its tokens after the context. HellaSwag: acc takes the likeliest ending, acc_norm the
likeliest per character. LAMBADA: acc counts passages whose last word is what greedy decoding would write; perplexity
is per word.
"""

import functools
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import PartialState
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from recipe.config import parse_tasks
from recipe.data.batches import example_rows
from recipe.data.tokenizer import document_start
from recipe.errors import UserError, one_line, short_reason
from recipe.evaluation.scoring import Window, batch_windows, exp_or_inf, pad_windows, show_progress
from recipe.hardware.processes import gather, on_main_process
from recipe.model.loss import IGNORE_INDEX

CHUNK = 32  # examples that a process scores before it looks whether it must stop
ORDER_SEED = 0


class Example(NamedTuple):
    """A context, its possible continuations (without the space in between), and the index of the correct one."""

    context: str
    choices: list[str]
    label: int


class Source(NamedTuple):
    """Where a task is on the Hub, in files that need no loading script, and how a row becomes an example."""

    hub_id: str
    config: str | None
    split: str
    columns: str
    to_example: Callable[[dict], Example]


class Score(NamedTuple):
    """The log-probability of a continuation in nats, and whether each of its tokens is the most likely one."""

    log_probability: float
    is_greedy: bool


# ------------------------------------------------------------------ examples


def hellaswag_example(row: dict) -> Example:
    """Return the topic and the beginning of a scene, and its four endings."""
    context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    return Example(_without_markup(context), list(map(_without_markup, row["endings"])), int(row["label"]))


def lambada_example(row: dict) -> Example:
    """Return a passage without its last word, and that word."""
    *context, word = row["text"].split(" ")
    return Example(" ".join(context), [word], 0)


def _without_markup(text: str) -> str:
    """Remove what HellaSwag's WikiHow texts keep of the pages: titles and brackets."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


SOURCES = {
    "hellaswag": Source(
        "Rowan/hellaswag", None, "validation", "activity_label, ctx_a, ctx_b, endings, label", hellaswag_example
    ),
    "lambada": Source("EleutherAI/lambada_openai", "default", "test", "text", lambada_example),
}


def load_tasks(items: list[str] | None) -> dict[str, list[Example]]:
    """Load the tasks of `--tasks` or `--eval_tasks` by name; the main process reads them. Raises `UserError`."""
    tasks = parse_tasks(items)
    return {name: on_main_process(functools.partial(read_examples, name, path)) for name, path in tasks.items()}


@functools.cache
def read_examples(task: str, path: str | None) -> list[Example]:
    """Read a task from a .jsonl file, or from the Hub if there is no path. Raises `UserError` for another schema."""
    source, examples = SOURCES[task], []
    for number, row in enumerate(_read_lines(path) if path else _read_hub(task, source), start=1):
        try:
            example = source.to_example(json.loads(row) if isinstance(row, str) else row)
            example.choices[example.label]
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            problem = f"{path or source.hub_id}, row {number} is no {task} example ({short_reason(error)})"
            raise UserError(f"{problem}; expected {source.columns}, as in the files of {source.hub_id}") from error
        examples.append(example)
    if not examples:
        raise UserError(f"{path or source.hub_id} is empty; the task {task} needs at least one example")
    return examples


def _read_lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            return [line for line in file if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the task file {path}: {one_line(error)}") from error


def _read_hub(task: str, source: Source) -> Iterable[Any]:
    import datasets  # not at the top, because training on a packed dataset does not need it

    try:
        return datasets.load_dataset(source.hub_id, source.config, split=source.split)
    except Exception as error:  # the Hub client, datasets and the file system raise various errors
        remedy = f"pass {task}=FILE.jsonl to read a local file"
        raise UserError(f"cannot download {source.hub_id}: {one_line(error)}; {remedy}") from error


# ------------------------------------------------------------------ scores


def score_task(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    name: str,
    examples: list[Example],
    tokens_per_batch: int,
    *,
    max_examples: int | None = None,
    vocab_size: int | None = None,
    must_stop: Callable[[], bool] = lambda: False,
) -> dict[str, float | None] | None:
    """Score the first examples of a fixed random order, in chunks that the processes divide among them.

    vocab_size: without padding. must_stop: asked between chunks, with the same answer on all processes; if it is
    true, the result is None. Returns the scores and their standard errors, num_examples and seconds.
    """
    started_at, state, scored = time.perf_counter(), PartialState(), {}
    # Any prefix of this order is a fair sample: HellaSwag's file begins with one of its two sources.
    order = example_rows(np.arange(len(examples)), len(examples), ORDER_SEED)[:max_examples].tolist()
    starts = range(0, len(order), CHUNK * state.num_processes)
    for start in show_progress(starts, name, len(starts)):
        if must_stop():
            return None
        mine = order[start : start + CHUNK * state.num_processes][state.process_index :: state.num_processes]
        pairs = [(examples[i].context, " " + choice) for i in mine for choice in examples[i].choices]
        windows = encode_pairs(tokenizer, pairs, model.config.max_position_embeddings)
        scores = iter(score_windows(model, windows, tokens_per_batch, vocab_size))
        scored |= {i: [next(scores) for _ in examples[i].choices] for i in mine}
    scored = {i: scores for part in gather(scored) for i, scores in part.items()}
    summarize = summarize_lambada if name == "lambada" else summarize_hellaswag
    summary = summarize([examples[i] for i in sorted(scored)], [scored[i] for i in sorted(scored)])
    return {**summary, "num_examples": len(scored), "seconds": time.perf_counter() - started_at}


def encode_pairs(tokenizer: PreTrainedTokenizerFast, pairs: Sequence[tuple[str, str]], context: int) -> list[Window]:
    """Encode (context, continuation) pairs; the continuation's tokens are the targets.

    Both texts are encoded together. If the context alone has n tokens, the first n tokens are context. White space at
    the end of the context belongs to the continuation. An empty context is the token that begins a document. What does
    not fit into the model is cut off on the left.
    """
    if not pairs:  # a process may get no example of the last chunk
        return []
    heads = [head.rstrip() for head, _ in pairs]
    heads_ids = tokenizer([head or " " for head in heads], verbose=False)["input_ids"]
    texts_ids = tokenizer([head + continuation for head, continuation in pairs], verbose=False)["input_ids"]
    first = document_start(tokenizer)[-1]
    windows = []
    for head, head_ids, text_ids in zip(heads, heads_ids, texts_ids, strict=True):
        ids, num_targets = text_ids, len(text_ids) - len(head_ids)
        if not head:
            ids = text_ids if text_ids[0] == first else [first, *text_ids]
            num_targets = len(ids) - 1
        kept = np.array(ids[-(context + 1) :])
        windows.append(Window(kept, max(0, min(num_targets, len(kept) - 1))))
    return windows


@torch.no_grad()
def score_windows(
    model: PreTrainedModel, windows: Sequence[Window], tokens_per_batch: int, vocab_size: int | None = None
) -> list[Score]:
    """Return the score of each window's targets. vocab_size: logits beyond it have no part in the softmax."""
    scores: dict[int, Score] = {}
    for batch in batch_windows([len(window.ids) for window in windows], tokens_per_batch):
        inputs, targets = pad_windows([windows[i] for i in batch], model.device)
        starts = [len(windows[i].ids) - 1 - windows[i].num_targets for i in batch]
        targets = targets[:, min(*starts, inputs.shape[1] - 1) :]
        logits = model(input_ids=inputs, use_cache=False, logits_to_keep=targets.shape[1]).logits
        logits = logits[targets != IGNORE_INDEX][:, :vocab_size].float()
        targets = targets[targets != IGNORE_INDEX]
        log_probabilities = logits.log_softmax(dim=-1).gather(1, targets[:, None])[:, 0].cpu().double()
        greedy = (logits.argmax(dim=-1) == targets).cpu()
        counts = [windows[i].num_targets for i in batch]
        for i, part, is_greedy in zip(batch, log_probabilities.split(counts), greedy.split(counts), strict=True):
            scores[i] = Score(part.sum().item(), is_greedy.all().item())
    return [scores[i] for i in range(len(windows))]


def summarize_hellaswag(examples: list[Example], scores: list[list[Score]]) -> dict[str, float | None]:
    """Return acc and acc_norm. scores: of each ending of each example."""
    hits, hits_norm = [], []
    for example, endings in zip(examples, scores, strict=True):
        totals = np.array([score.log_probability for score in endings])
        hits.append(totals.argmax() == example.label)
        hits_norm.append((totals / list(map(len, example.choices))).argmax() == example.label)
    (acc, error), (acc_norm, error_norm) = _mean_and_error(hits), _mean_and_error(hits_norm)
    return {"acc": acc, "acc_stderr": error, "acc_norm": acc_norm, "acc_norm_stderr": error_norm}


def summarize_lambada(_: list[Example], scores: list[list[Score]]) -> dict[str, float | None]:
    """Return acc and perplexity. scores: of the last word of each passage."""
    words = [score for (score,) in scores]
    acc, acc_error = _mean_and_error([word.is_greedy for word in words])
    nats, nats_error = _mean_and_error([-word.log_probability for word in words])
    perplexity = exp_or_inf(nats)
    error = None if nats_error is None else perplexity * nats_error  # of exp(x): exp(x) times the error of x
    return {"acc": acc, "acc_stderr": acc_error, "perplexity": perplexity, "perplexity_stderr": error}


def _mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and its standard error; a single value has none."""
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None
    return float(np.mean(values)), error
