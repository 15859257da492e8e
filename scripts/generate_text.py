"""Text from a saved model.

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
        "--model", "--model_name_or_path", required=True, help="folder of a run, a checkpoint in it, or a Hub id"
    )
    parser.add_argument("--prompt", default="", help="text to continue; empty starts a new document")
    parser.add_argument("--max_new_tokens", type=int, default=200, help="tokens to add at most")
    parser.add_argument("--num_samples", type=int, default=1, help="continuations")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token")
    parser.add_argument("--top_k", type=int, default=200, help="sample from the k likeliest tokens; 0: from all")
    parser.add_argument("--top_p", type=float, default=1.0, help="... and from the likeliest that make up p; 1: all")
    parser.add_argument("--seed", type=int, default=1337, help="the same seed gives the same text")
    args = parser.parse_args()
    texts = generate_texts(
        args.model,
        args.prompt,
        max_new_tokens=args.max_new_tokens,
        num_samples=args.num_samples,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        device=PartialState().device,
    )
    print("\n\n---\n\n".join(texts))


if __name__ == "__main__":
    run_main(main)
