"""Generate text with a saved model.

python scripts/generate_text.py --model runs/demo --prompt "import "
python scripts/generate_text.py --model runs/demo --interactive
python scripts/generate_text.py --model runs/demo --interactive < prompts.txt

One text appears as it is written; with --num_samples, the texts of a prompt appear together when all are complete.
With --interactive, a model that has a chat template answers in a dialog. Only text goes to stdout.
"""

import argparse
import contextlib
import math
import sys
from collections.abc import Iterator
from typing import Any

from recipe.arguments import CommandLine, as_path  # first: it sets up OpenMP's threads, before torch is loaded

# isort: split
from accelerate import PartialState

from recipe.errors import UserError, printable, run_main
from recipe.evaluation.generation import Turns, generate_texts, load_model
from recipe.hardware.devices import device_of

SEPARATOR = "\n\n---\n\n"
# Options of `generate` that it does not check itself, and their ranges. Beyond, scores overflow, or are all the same.
SAMPLING = {"temperature": (1e-4, 1e4), "repetition_penalty": (1e-4, 1e4), "top_p": (0, 1), "top_k": (0, math.inf)}


def main() -> None:
    args = parse()
    options: dict[str, Any] = {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None}
    if options.get("temperature") == 0:
        options |= {"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0}  # of no effect, and no warning
    elif options.keys() & {"temperature", "top_k", "top_p"}:
        options["do_sample"] = True
    options |= {"max_new_tokens": args.max_new_tokens, "num_samples": args.num_samples}
    device = device_of(PartialState())
    model, tokenizer = load_model(args.model_name_or_path, device, args.revision, args.trust_remote_code)
    show = printable if sys.stdout.isatty() else str  # a file or a pipe gets the text as it is
    if args.num_samples == 1:
        options["stream"] = lambda text: print(show(text), end="", flush=True)
    turns: Turns | None = [] if args.interactive and tokenizer.chat_template else None
    prompts = ask() if args.interactive else [args.prompt]
    for index, prompt in enumerate(prompts):
        head = prompt if turns is None else ""  # an answer does not begin with the question
        if turns is not None:
            turns.append({"role": "user", "content": prompt})
        if args.num_samples == 1:
            print(show(head), end="", flush=True)
        # A prompt typed again gets another text.
        texts = generate_texts(model, tokenizer, turns or prompt, seed=args.seed + index, **options)
        if args.num_samples > 1:
            print(show(SEPARATOR.join(head + text for text in texts)), end="")
        print("\n" if args.interactive else "", flush=True)
        if turns is not None:
            turns.append({"role": "assistant", "content": texts[0]})


def parse() -> argparse.Namespace:
    parser = CommandLine(
        description="Sample continuations of a prompt.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--model_name_or_path",
        "--model",
        required=True,
        type=as_path,
        help="folder of a run or of a checkpoint, or a Hub id",
    )
    parser.add_argument("--revision", help="branch of a Hub model, such as step-000400-0.8M-3f9a1c")
    parser.add_argument("--trust_remote_code", action="store_true", help="run the code that the model brings")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", default="", help="text to continue; an empty prompt starts a new document")
    prompts.add_argument(
        "--interactive", action="store_true", help="read prompts, one per line, until an empty line or Ctrl-D"
    )
    parser.add_argument("--max_new_tokens", type=int, default=200, help="generate up to this many tokens")
    parser.add_argument("--num_samples", type=int, default=1, help="continuations per prompt")
    sampling = parser.add_argument_group(
        "sampling", "Defaults: the model's generation_config.json, else temperature 0.8 and top_k 200."
    )
    sampling.add_argument("--temperature", type=float, help="sampling temperature; 0 is greedy")
    sampling.add_argument("--top_k", type=int, help="sample from the k most likely tokens; 0: from all")
    sampling.add_argument("--top_p", type=float, help="sample from the top tokens that sum to p")
    sampling.add_argument("--repetition_penalty", type=float, help="above 1, tokens of the context become less likely")
    parser.add_argument("--seed", type=int, default=1337, help="the same seed generates the same text")
    args = parser.parse_args()
    for name in ("max_new_tokens", "num_samples"):
        if getattr(args, name) < 1:
            raise UserError(f"{name} must be at least 1, got {getattr(args, name)}")
    for name, (lowest, highest) in SAMPLING.items():
        value = getattr(args, name)
        if value is not None and not lowest <= value <= highest and (name, value) != ("temperature", 0):
            raise UserError(f"{name} must be from {lowest:g} to {highest:g}, got {value}")
    return args


def ask() -> Iterator[str]:
    """Yield prompts from a terminal or a pipe until an empty line, the end of the input, or Ctrl-C."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (input() then has arrow keys and a history)
    on_terminal = sys.stdin.isatty()
    if on_terminal:
        print("Enter a prompt. An empty line, Ctrl-D or Ctrl-C ends.", file=sys.stderr)
    marker = "> " if on_terminal and sys.stdout.isatty() else ""
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while prompt := input(marker).rstrip("\r"):
            yield prompt
    print(end="\n" if on_terminal else "", file=sys.stderr)


if __name__ == "__main__":
    run_main(main, is_alone=True)
