"""The scores of an evaluation as metrics of Hugging Face's evaluate library. They download nothing."""

import math

import datasets
import evaluate
import numpy as np

from recipe.evaluation.scoring import exp_or_inf, summarize_loss


class LanguageModelingMetric(evaluate.Metric):
    """Computes loss, perplexity and bits per byte from the sums of any number of batches.

    compute(predictions=[sums of nats], references=[numbers of target tokens], tokens_per_byte=...)
    With tokens_per_character, also bits per character.
    """

    def _info(self):
        return evaluate.MetricInfo(
            description="Mean negative log-likelihood per token in nats, its exponential, and bits per byte of text.",
            citation="",
            inputs_description="predictions: sums of nats; references: the number of target tokens in each sum.",
            features=datasets.Features(predictions=datasets.Value("float64"), references=datasets.Value("int64")),
        )

    def _compute(self, predictions, references, tokens_per_byte, tokens_per_character=None):
        return summarize_loss(math.fsum(predictions), sum(references), tokens_per_byte, tokens_per_character)


class MultipleChoiceMetric(evaluate.Metric):
    """Computes the share of examples whose correct choice is the likeliest: in total, and per character.

    compute(predictions=[[log-probability of each choice]], references=[correct index], lengths=[[characters]])
    """

    def _info(self):
        return evaluate.MetricInfo(
            description="acc: the likeliest choice is correct; acc_norm: the likeliest per character is.",
            citation="",
            inputs_description="predictions: log-probabilities of the choices; references: the correct choice.",
            features=datasets.Features(
                predictions=datasets.Sequence(datasets.Value("float64")), references=datasets.Value("int64")
            ),
        )

    def _compute(self, predictions, references, lengths):
        hits = [np.argmax(found) == label for found, label in zip(predictions, references, strict=True)]
        per_character = [np.divide(found, sizes) for found, sizes in zip(predictions, lengths, strict=True)]
        hits_norm = [np.argmax(found) == label for found, label in zip(per_character, references, strict=True)]
        return {
            **{"acc": float(np.mean(hits)), "acc_stderr": _standard_error(hits)},
            **{"acc_norm": float(np.mean(hits_norm)), "acc_norm_stderr": _standard_error(hits_norm)},
        }


class LastWordMetric(evaluate.Metric):
    """Computes how often greedy decoding writes the last word, and the perplexity of that word.

    compute(predictions=[log-probability of the word], references=[whether each of its tokens is the likeliest])
    """

    def _info(self):
        return evaluate.MetricInfo(
            description="acc: share of words that greedy decoding writes; perplexity: of a word.",
            citation="",
            inputs_description="predictions: log-probabilities of words; references: whether each is greedy.",
            features=datasets.Features(predictions=datasets.Value("float64"), references=datasets.Value("bool")),
        )

    def _compute(self, predictions, references):
        perplexity, error = exp_or_inf(-float(np.mean(predictions))), _standard_error(predictions)
        return {
            **{"acc": float(np.mean(references)), "acc_stderr": _standard_error(references)},
            # The error of exp(x) is exp(x) times the error of x.
            **{"perplexity": perplexity, "perplexity_stderr": None if error is None else perplexity * error},
        }


def _standard_error(values: list[float]) -> float | None:
    """Return the standard error of the mean; a single value has none."""
    return float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None
