"""Published scores of OpenAI's GPT-2, zero-shot, each with its source."""

from typing import NamedTuple

SIZES = ("124M", "355M", "774M", "1558M")


class Reference(NamedTuple):
    """Scores of some sizes from one source: {score: {size: value}}."""

    task: str
    scoring: str
    source: str
    scores: dict[str, dict[str, float]]


LM_EVAL = "lm-eval"  # scored like this recipe's own scores
PAPER = "OpenAI's own text and scoring"  # LAMBADA cleaned by OpenAI; not comparable with the other scores
REFERENCES = (
    Reference(
        *("hellaswag", LM_EVAL, "karpathy/build-nanogpt, hellaswag.py"),
        {"acc": {"124M": 0.2892, "1558M": 0.4004}, "acc_norm": {"124M": 0.3114, "1558M": 0.5089}},
    ),
    Reference(
        *("lambada", LM_EVAL, "EleutherAI/lm-evaluation-harness, issue 2159"),
        {"acc": {"124M": 0.3256}, "perplexity": {"124M": 40.0554}},
    ),
    Reference(
        *("lambada", LM_EVAL, "model card of EleutherAI/gpt-j-6b"),
        {"acc": {"1558M": 0.5121}, "perplexity": {"1558M": 10.63}},
    ),
    Reference(
        *("lambada", PAPER, "Radford et al. 2019, Table 3"),
        {
            "acc": {"124M": 0.4599, "355M": 0.5548, "774M": 0.6012, "1558M": 0.6324},
            "perplexity": {"124M": 35.13, "355M": 15.60, "774M": 10.87, "1558M": 8.63},
        },
    ),
)


def find_reference(task: str, scoring: str, score: str) -> dict[str, float]:
    """Return {size: value} from all sources; sizes without a source are missing."""
    found = (r.scores.get(score, {}) for r in REFERENCES if (r.task, r.scoring) == (task, scoring))
    return {size: value for scores in found for size, value in scores.items()}
