"""Zero-shot scores on HellaSwag and LAMBADA, by the rules of EleutherAI's lm-evaluation-harness 0.4.

A continuation is scored by the sum of the log-probabilities of its tokens after the context. HellaSwag: acc takes the
likeliest ending, acc_norm the likeliest per character. LAMBADA: acc counts passages whose last word is what greedy
decoding would write; perplexity is per word.
"""

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import gettempdir

import numpy as np
from accelerate import PartialState
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from recipe.config import parse_tasks
from recipe.data.batches import example_rows
from recipe.data.task_files import SOURCES, Example, read_examples
from recipe.evaluation.scoring import Row, Score, make_batches, score_batch, show_progress
from recipe.hardware.host_memory import FreedMemory
from recipe.hardware.processes import gather, largest_of_processes, on_main_process

CHUNK = 32  # examples between two looks at the clock
ORDER_SEED = 0


def load_tasks(given: list[str] | None, tokenizer: PreTrainedTokenizerBase, context: int) -> list["EvalTask"]:
    """Load the tasks of `--tasks` or `--eval_tasks`; the main process reads them. context: n_positions of the model.

    Raises `UserError` for an unknown task, and a file that is missing or has another schema.
    """
    return [
        EvalTask(name, on_main_process(functools.partial(read_examples, name, path)), tokenizer, context, path)
        for name, path in parse_tasks(given).items()
    ]


class EvalTask:
    """The examples of a task, and their token ids as soon as they have been needed."""

    def __init__(
        self,
        name: str,
        examples: list[Example],
        tokenizer: PreTrainedTokenizerBase,
        context: int,
        path: str | None = None,
    ) -> None:
        self.name, self.examples, self.tokenizer, self.context = name, examples, tokenizer, context
        self.source = Path(path).name if path else SOURCES[name].hub_id
        # Any prefix of this order is a fair sample: HellaSwag's file begins with one of its two sources.
        self.order = example_rows(np.arange(len(examples)), len(examples), ORDER_SEED)
        self.rows: dict[int, list[Row]] = {}

    def run(
        self,
        model: PreTrainedModel,
        vocab_size: int,
        tokens_per_batch: int,
        max_examples: int | None = None,
        max_seconds: float | None = None,
        must_stop: Callable[[], bool] = lambda: False,
    ) -> dict[str, float | None] | None:
        """Score the first examples of a fixed random order, in chunks that the processes divide among them.

        No chunk starts that would end after max_seconds on some process, but one is scored. Returns the scores and
        standard errors, num_examples and seconds; None if must_stop, asked between chunks, is true.
        """
        started_at, longest, found = time.perf_counter(), 0.0, {}
        state, freed_memory = PartialState(), FreedMemory()
        order = self.order[:max_examples]
        chunks = [order[start : start + CHUNK] for start in range(0, len(order), CHUNK)]
        rounds = range(0, len(chunks), state.num_processes)
        for start in show_progress(rounds, self.name, "chunk", len(rounds)):
            if must_stop():
                return None
            chunk_started_at = time.perf_counter()
            is_late = bool(max_seconds and start) and chunk_started_at + longest > started_at + max_seconds
            if largest_of_processes(is_late)[0]:
                break
            for chunk in chunks[start : start + state.num_processes][state.process_index :][:1]:
                found |= self._score(chunk.tolist(), model, vocab_size, tokens_per_batch)
            freed_memory.give_back()
            longest = max(longest, time.perf_counter() - chunk_started_at)
        scores = {index: scores for part in gather(found) for index, scores in part.items()}
        return {**self._compute(scores), "num_examples": len(scores), "seconds": time.perf_counter() - started_at}

    def _score(
        self, chunk: list[int], model: PreTrainedModel, vocab_size: int, tokens_per_batch: int
    ) -> dict[int, list[Score]]:
        """Return the scores of each example's choices."""
        if new := [index for index in chunk if index not in self.rows]:
            pairs = [(self.examples[i].context, " " + choice) for i in new for choice in self.examples[i].choices]
            rows = iter(encode_pairs(self.tokenizer, pairs, self.context))
            self.rows |= {i: [next(rows) for _ in self.examples[i].choices] for i in new}
        rows = [row for index in chunk for row in self.rows[index]]
        scores: dict[int, Score] = {}
        for batch in make_batches([len(row.ids) for row in rows], tokens_per_batch):
            scores |= zip(batch.tolist(), score_batch(model, vocab_size, [rows[i] for i in batch]), strict=True)
        in_order = iter(scores[i] for i in range(len(rows)))
        return {index: [next(in_order) for _ in self.rows[index]] for index in chunk}

    def _compute(self, scores: dict[int, list[Score]]) -> dict[str, float | None]:
        from recipe.evaluation.perplexity import LastWordMetric, MultipleChoiceMetric  # importing evaluate is slow

        indices = sorted(scores)
        options = {"keep_in_memory": True, "cache_dir": gettempdir()}
        if self.name == "lambada":
            words = [scores[i][0] for i in indices]
            return LastWordMetric(**options).compute(
                predictions=[word.log_probability for word in words], references=[word.is_greedy for word in words]
            )
        return MultipleChoiceMetric(**options).compute(
            predictions=[[choice.log_probability for choice in scores[i]] for i in indices],
            references=[self.examples[i].label for i in indices],
            lengths=[list(map(len, self.examples[i].choices)) for i in indices],
        )


def encode_pairs(tokenizer: PreTrainedTokenizerBase, pairs: Sequence[tuple[str, str]], context: int) -> list[Row]:
    """Encode (context, continuation) pairs; the continuation's tokens are the targets.

    The continuation's tokens are those of both texts together after as many as the context alone has. White space at
    the end of the context belongs to the continuation. An empty context is the token that begins a document. What
    does not fit into the model is cut off on the left.
    """
    heads = [head.rstrip() for head, _ in pairs]
    heads_ids = tokenizer([head or " " for head in heads], verbose=False)["input_ids"]
    texts_ids = tokenizer([head + continuation for head, continuation in pairs], verbose=False)["input_ids"]
    first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    rows = []
    for head, head_ids, text_ids in zip(heads, heads_ids, texts_ids, strict=True):
        ids, num_targets = text_ids, len(text_ids) - len(head_ids)
        if not head:
            ids = text_ids if text_ids[0] == first else [first, *text_ids]
            num_targets = len(ids) - 1
        row = np.array(ids[-(context + 1) :], dtype=np.int64)
        rows.append(Row(row, max(0, min(num_targets, len(row) - 1))))
    return rows
