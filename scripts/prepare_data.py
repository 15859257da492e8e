"""Text -> packed dataset on disk.

python scripts/prepare_data.py --train_file a.txt --tokenizer_name DIR_OR_ID --block_size 256 --output_dir DIR
"""

import dataclasses
from pathlib import Path

from recipe.command_line import CommandLine
from recipe.data.prepare import add_source_arguments, prepare_dataset, source_from
from recipe.data.shards import merge_shards, shard_dir
from recipe.data.tokenizer import load_tokenizer
from recipe.errors import UserError, run_main


def main() -> None:
    parser = CommandLine(description="Tokenize and pack text for recipe/train.py --dataset_dir.")
    add_source_arguments(parser)
    parser.add_argument("--tokenizer_name", help="tokenizer folder or Hub id")
    parser.add_argument("--block_size", type=int, default=1024, help="tokens a row (default: 1024)")
    parser.add_argument("--output_dir", required=True, type=Path, help="folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace the packed dataset in output_dir")
    parser.add_argument("--preprocessing_num_workers", type=int, help="threads that encode (default: all cores)")
    parser.add_argument("--num_shards", type=int, default=1, help="machines or jobs that share the work")
    parser.add_argument("--shard_index", type=int, help="this one's number, from 0")
    parser.add_argument("--merge_shards", action="store_true", help="join the shards that are done, at --output_dir")
    args = parser.parse_args()
    for name in ("block_size", "num_shards", "preprocessing_num_workers"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(f"{name} must be at least 1, got {getattr(args, name)}")
    directory = args.output_dir.absolute()
    if args.merge_shards:
        metadata = merge_shards(directory, args.num_shards)
        rows = ", ".join(f"{counts['rows']:,} {split} rows" for split, counts in metadata["splits"].items())
        print(f"{directory} is one dataset of {args.num_shards} shards, which must stay beside it: {rows}")
        say_next(metadata["block_size"], args.output_dir)
        return
    if args.num_shards > 1:
        if args.shard_index is None:
            raise UserError("--num_shards needs --shard_index (0 to num_shards - 1), or --merge_shards at the end")
        directory = shard_dir(directory, args.shard_index, args.num_shards)
    if args.tokenizer_name is None:
        raise UserError("--tokenizer_name is needed: a folder or a Hub id; scripts/train_tokenizer.py makes one")
    source = dataclasses.replace(source_from(args), num_shards=args.num_shards, shard_index=args.shard_index or 0)
    tokenizer = load_tokenizer(args.tokenizer_name)
    workers = args.preprocessing_num_workers
    prepare_dataset(source, directory, args.block_size, tokenizer, overwrite=args.overwrite, num_workers=workers)
    if args.num_shards == 1:
        say_next(args.block_size, args.output_dir)


def say_next(block_size: int, directory: Path) -> None:
    recipe = "--config gpt2_124m " if block_size == 1024 else ""
    print(f"train on it with: accelerate launch recipe/train.py {recipe}--dataset_dir {directory}")


if __name__ == "__main__":
    run_main(main, "interrupted; the same command resumes from here")
