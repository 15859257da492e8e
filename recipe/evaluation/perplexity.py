"""Loss, perplexity and bits per byte as a metric of Hugging Face's evaluate library."""

import math

import datasets
import evaluate


class LanguageModelingMetric(evaluate.Metric):
    """Computes loss, perplexity and bits per byte from the sums of any number of batches; downloads nothing.

    compute(predictions=[sums of nats], references=[numbers of target tokens], tokens_per_byte=...)
    """

    def _info(self):
        return evaluate.MetricInfo(
            description="Mean negative log-likelihood per token in nats, its exponential, and bits per byte of text.",
            citation="",
            inputs_description="predictions: sums of nats; references: the number of target tokens in each sum.",
            features=datasets.Features(predictions=datasets.Value("float64"), references=datasets.Value("int64")),
        )

    def _compute(self, predictions, references, tokens_per_byte):
        loss = math.fsum(predictions) / sum(references)
        return {
            "loss": loss,
            "perplexity": math.exp(loss) if loss < 700 else math.inf,
            "bits_per_byte": loss / math.log(2) * tokens_per_byte,
        }
