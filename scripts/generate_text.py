"""Generate text from a saved model.

python scripts/generate_text.py --model runs/demo --prompt "import "
python scripts/generate_text.py --model runs/demo --interactive
python scripts/generate_text.py --model runs/demo --prompts_file prompts.txt --output_file texts.jsonl

One text appears token by token; with --num_samples, the texts of a prompt appear together when all are complete.
Only text goes to stdout.
"""

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import set_seed

from recipe.arguments import CommandLine
from recipe.errors import UserError, run_main
from recipe.evaluation.generation import Sampling, TokenStream, check_prompt, continue_prompt, load_generator

SEPARATOR = "\n\n---\n\n"


def main() -> None:
    args = parse()
    sampling = Sampling(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Sampling)})
    prompts = read_prompts(args.prompts_file) if args.prompts_file else [args.prompt]
    for prompt in prompts:
        check_prompt(prompt)
    with open_output(args.output_file) as output:
        model, tokenizer = load_generator(args.model_name_or_path, PartialState().device, args.revision)
        if output is not None:
            output.truncate(0)
        stream = TokenStream(write if sampling.num_samples == 1 else None)
        try:
            for index, prompt in enumerate(ask() if args.interactive else prompts):
                if index == 0 or not args.interactive:  # a prompt that is typed again gets another text
                    set_seed(sampling.seed)
                if index > 0 and not args.interactive:
                    write(SEPARATOR)
                texts = continue_prompt(model, tokenizer, prompt, sampling, stream=stream)
                if stream.write is None:
                    write(SEPARATOR.join(texts))
                if output is not None:
                    rows = [json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False) for text in texts]
                    output.write("\n".join(rows) + "\n")
                if args.interactive:
                    write("\n\n")
        except KeyboardInterrupt:
            if not args.interactive:
                raise
            print(file=sys.stderr)
    if not args.interactive:
        write("\n")
    if stream.num_tokens:
        speed = f"{stream.num_tokens / stream.seconds:,.1f} tokens/s without the first token of each text"
        print(f"{stream.num_tokens:,} tokens in {stream.seconds:.2f} s: {speed}", file=sys.stderr)


def parse() -> argparse.Namespace:
    parser = CommandLine(
        description="Sample continuations of a prompt.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--model_name_or_path", "--model", required=True, help="folder of a run or of a checkpoint, or a Hub id"
    )
    parser.add_argument("--revision", help="branch of a Hub model, such as step-001000-0.5B")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", default="", help="text to continue; an empty prompt starts a new document")
    prompts.add_argument(
        "--prompts_file", type=Path, help='one prompt per line, or a .jsonl file of {"prompt": "..."}'
    )
    prompts.add_argument(
        "--interactive", action="store_true", help="read prompts, one per line, until an empty line or Ctrl-D"
    )
    parser.add_argument("--output_file", type=Path, help='also write the texts to a .jsonl file of {"prompt", "text"}')
    parser.add_argument("--max_new_tokens", type=int, default=200, help="generate up to this many tokens")
    parser.add_argument(
        "--num_samples", type=int, default=1, help="continuations per prompt; several appear when all are complete"
    )
    parser.add_argument("--temperature", type=float, default=0.8, help="sampling temperature; 0 is greedy")
    parser.add_argument(
        "--top_k", type=int, default=200, help="sample from the k most likely tokens; 0 turns this off"
    )
    parser.add_argument("--top_p", type=float, default=1.0, help="sample from the top tokens that sum to p")
    parser.add_argument(
        "--repetition_penalty", type=float, default=1.0, help="above 1, tokens of the context become less likely"
    )
    parser.add_argument("--seed", type=int, default=1337, help="the same seed generates the same text")
    return parser.parse_args()


def write(text: str) -> None:
    print(text, end="", flush=True)


def ask() -> Iterator[str]:
    """Yield prompts from a terminal or a pipe until an empty line or the end of the input."""
    on_terminal = sys.stdin.isatty()
    if on_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (input() then has arrow keys and a history)
        print("Enter a prompt. An empty line, Ctrl-D or Ctrl-C ends.", file=sys.stderr)
    while True:
        try:
            prompt = input("> " if on_terminal and sys.stdout.isatty() else "").rstrip("\r")
        except EOFError:
            print(end="\n" if on_terminal else "", file=sys.stderr)
            return
        except UnicodeDecodeError as error:
            raise UserError("the prompt is not valid UTF-8 text") from error
        if not prompt:
            return
        check_prompt(prompt)
        yield prompt


def read_prompts(path: Path) -> list[str]:
    """Read a file of prompts. Raises `UserError` if it holds none or cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    prompts = [line for line in lines if line.strip()]
    if path.suffix == ".jsonl":
        prompts = [prompt_of(line, f"line {number} of {path}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise UserError(f"there is no prompt in {path}")
    return prompts


def prompt_of(line: str, where: str) -> str:
    """Return the prompt of a JSON line."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise UserError(f'{where} must look like {{"prompt": "..."}}, got {line[:60]}')
    return row["prompt"]


def open_output(path: Path | None) -> contextlib.AbstractContextManager:
    """Open the file to write, which keeps its content until a model is loaded; None without a path."""
    try:
        return open(path, "a", encoding="utf-8") if path else contextlib.nullcontext()
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


if __name__ == "__main__":
    run_main(main)
