"""Text -> byte-level BPE tokenizer like GPT-2's.

python scripts/train_tokenizer.py --train_file a.txt --vocab_size 8192 --output_dir DIR
"""

from pathlib import Path

from recipe.arguments import CommandLine, shell_command
from recipe.config import TEXT_OPTIONS
from recipe.data.read import list_units, read_train_texts
from recipe.data.source import source_from
from recipe.data.tokenizer import count_ids, save_tokenizer, train_tokenizer
from recipe.errors import UserError, run_main


def main() -> None:
    parser = CommandLine(description="Train a byte-level BPE on the training documents.")
    parser.add_run_options(("train_file", "dataset_name", *TEXT_OPTIONS))
    parser.add_argument(
        "--vocab_size", type=int, default=50257, help="tokens, including <|endoftext|> (default: 50257)"
    )
    parser.add_argument("--output_dir", required=True, type=Path, help="output folder, which must be new or empty")
    args = parser.parse_args()
    if args.vocab_size < 257:
        raise UserError(f"vocab_size must be at least 257 (256 bytes and <|endoftext|>), got {args.vocab_size}")
    try:
        args.output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot create {args.output_dir}: {error.strerror}") from error
    if any(args.output_dir.iterdir()):
        raise UserError(f"{args.output_dir} is not empty; choose another folder")
    source = source_from(args)
    tokenizer = train_tokenizer(read_train_texts(source, list_units(source)), args.vocab_size)
    save_tokenizer(tokenizer, args.output_dir)
    print(f"trained a byte-level BPE of {count_ids(tokenizer):,} of up to {args.vocab_size:,} tokens")
    print(f"use it with {shell_command(tokenizer_name=args.output_dir)}")


if __name__ == "__main__":
    run_main(main, is_alone=True)
