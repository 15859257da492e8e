"""Generate text from a saved model.

python scripts/generate_text.py --model runs/demo --prompt "import "
"""

import argparse

from accelerate import PartialState

from recipe.command_line import CommandLine
from recipe.errors import run_main
from recipe.evaluation.generation import generate_texts


def main() -> None:
    parser = CommandLine(
        description="Sample continuations of a prompt.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--model_name_or_path", "--model", required=True, help="folder of a run or of a checkpoint, or a Hub id"
    )
    parser.add_argument("--prompt", default="", help="text to continue; an empty prompt starts a new document")
    parser.add_argument("--max_new_tokens", type=int, default=200, help="generate up to this many tokens")
    parser.add_argument("--num_samples", type=int, default=1, help="number of continuations")
    parser.add_argument("--temperature", type=float, default=0.8, help="sampling temperature; 0 is greedy")
    parser.add_argument(
        "--top_k", type=int, default=200, help="sample from the k most likely tokens; 0 turns this off"
    )
    parser.add_argument("--top_p", type=float, default=1.0, help="sample from the top tokens that sum to p")
    parser.add_argument("--seed", type=int, default=1337, help="the same seed generates the same text")
    texts = generate_texts(**vars(parser.parse_args()), device=PartialState().device)
    print("\n\n---\n\n".join(texts))


if __name__ == "__main__":
    run_main(main)
