"""Loss, perplexity and bits per byte as a metric of Hugging Face's evaluate library. It downloads nothing."""

import math
from tempfile import TemporaryDirectory

import datasets
import evaluate

from recipe.evaluation.scoring import Totals


class LanguageModelingMetric(evaluate.Metric):
    """Computes loss (nats per token), perplexity and bits per byte from the sums of any number of batches.

    compute(predictions=[sums of nats], references=[numbers of tokens], text_nats=..., num_bytes=...)
    text_nats: sum over the tokens of text, without special tokens. num_bytes: of their text; None if it is not known.
    """

    def __init__(self) -> None:
        # In memory. The library (0.4) creates a folder all the same: not at home, which may be read-only, and under no
        # fixed name, which another user of the machine may own.
        with TemporaryDirectory() as folder:
            super().__init__(keep_in_memory=True, cache_dir=folder)

    def _info(self):
        return evaluate.MetricInfo(
            description="Mean negative log-likelihood per token in nats, its exponential, and bits per byte of text.",
            citation="",
            inputs_description="predictions: sums of nats; references: the number of target tokens in each sum.",
            features=datasets.Features(predictions=datasets.Value("float64"), references=datasets.Value("int64")),
        )

    def _compute(self, predictions, references, text_nats, num_bytes):
        return Totals(math.fsum(predictions), sum(references), text_nats, 0).scores(num_bytes)
