"""Text -> packed dataset on disk.

python scripts/prepare_data.py --train_file a.txt --tokenizer_name DIR_OR_ID --output_dir DIR
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from recipe.arguments import CommandLine, as_path, shell_command
from recipe.config import SPLITS, TEXT_OPTIONS
from recipe.data.packed import list_stretches
from recipe.data.prepare import prepare_dataset
from recipe.data.source import source_from
from recipe.data.tokenizer import load_tokenizer, without_template
from recipe.errors import UserError, run_main
from recipe.progress import unfailing_output


@unfailing_output()
def main() -> None:
    parser = CommandLine(description="Tokenize and pack text for recipe/train.py --dataset_dir.")
    parser.add_run_options(("train_file", "dataset_name", *TEXT_OPTIONS))
    parser.add_argument("--tokenizer_name", type=as_path, help="tokenizer folder or Hub id, for a new model")
    parser.add_argument(
        "--model_name_or_path", type=as_path, help="model to fine-tune: its tokenizer, and what that puts in front"
    )
    parser.add_argument("--output_dir", type=Path, required=True, help="folder to create")
    parser.add_argument("--overwrite", action="store_true", help="replace the packed dataset in output_dir")
    parser.add_argument("--preprocessing_num_workers", type=int, help="processes (default: one per core)")
    parser.add_argument("--num_shards", type=int, default=1, help="number of jobs that share the work")
    parser.add_argument("--shard_index", type=int, help="number of this job, from 0")
    args = parser.parse_args()
    for name in ("num_shards", "preprocessing_num_workers"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(f"{name} must be at least 1, got {getattr(args, name)}")
    is_array = args.num_shards > 1 or args.shard_index is not None
    if is_array and args.shard_index not in range(args.num_shards):
        raise UserError(
            f"the jobs of an array need --num_shards N and --shard_index 0 to N - 1; got {args.shard_index}"
        )
    if (args.tokenizer_name is None) == (args.model_name_or_path is None):
        how = "for a new model (scripts/train_tokenizer.py creates one), or --model_name_or_path to fine-tune one"
        raise UserError(f"pass --tokenizer_name, a folder or Hub id, {how}")
    source = source_from(args)
    tokenizer = load_tokenizer(args.tokenizer_name or args.model_name_or_path)
    metadata = prepare_dataset(
        source,
        args.output_dir.absolute(),
        without_template(tokenizer) if args.tokenizer_name else tokenizer,
        overwrite=args.overwrite,
        num_workers=args.preprocessing_num_workers,
        share=slice(args.shard_index, None, args.num_shards),
    )
    if metadata is not None:
        print_contents(args.output_dir, metadata)
        model = {"model_name_or_path": args.model_name_or_path} if args.model_name_or_path else {}
        command = shell_command("accelerate", "launch", "recipe/train.py", dataset_dir=args.output_dir, **model)
        print(f"train on it with: {command}")


def print_contents(directory: Path, metadata: dict[str, Any]) -> None:
    """Print what a dataset holds, and the beginning of its training text."""
    splits = metadata["splits"]
    rows: list[tuple[str, ...]] = [("", *SPLITS)]
    for label, value in (
        ("documents", lambda split: f"{split['documents']:,}"),
        ("tokens", lambda split: f"{split['tokens']:,}"),
        ("bytes per token of text", describe_bytes),
        ("unknown tokens", lambda split: f"{split['unknown'] / split['tokens']:.2%}"),
        ("rows of 1,024 tokens", lambda split: f"{(split['tokens'] - 1) // 1024:,}"),
    ):
        rows.append((label, *(value(splits[split]) for split in SPLITS)))
    for label, *columns in rows:
        print(f"{label:32}" + "".join(f"{column:>16}" for column in columns))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer" / "tokenizer.json"))
    stretches = list_stretches(directory, metadata, "train")
    for number in sorted({third * len(stretches) // 3 for third in range(3)}):
        path, id_type, start, count = stretches[number]
        ids = np.fromfile(path, id_type, min(80, count), offset=start)
        print(f"{Path(path).name}: {show_ids(tokenizer, ids.tolist())}"[:80])


def describe_bytes(counts: dict[str, Any]) -> str:
    return "-" if counts["bytes"] is None else f"{counts['bytes'] / max(1, counts['text_tokens']):.2f}"


def show_ids(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Return text in quotes. Special tokens, which are ids of their own, stay outside the quotes."""
    special = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    parts = [(key, list(group)) for key, group in itertools.groupby(ids, special.__contains__)]
    shown = [tokenizer.decode(part, skip_special_tokens=False) for _, part in parts]
    return " ".join(text if key else repr(text) for (key, _), text in zip(parts, shown, strict=True))


if __name__ == "__main__":
    run_main(main, "interrupted; run the same command again to resume", is_alone=True)
