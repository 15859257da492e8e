"""Text -> packed dataset on disk.

python scripts/prepare_data.py --train_file a.txt --tokenizer_name DIR_OR_ID --block_size 256 --output_dir DIR
python scripts/prepare_data.py --inspect DIR
"""

import dataclasses
from pathlib import Path

from recipe.arguments import CommandLine
from recipe.data.contents import print_contents
from recipe.data.packed import open_packed_dataset
from recipe.data.prepare import add_source_arguments, prepare_dataset, source_from
from recipe.data.shards import merge_shards, shard_dir
from recipe.data.tokenizer import read_tokenizer
from recipe.errors import UserError, run_main


def main() -> None:
    parser = CommandLine(description="Tokenize and pack text for recipe/train.py --dataset_dir.")
    add_source_arguments(parser)
    parser.add_argument("--tokenizer_name", help="tokenizer folder or Hub id")
    parser.add_argument("--block_size", type=int, default=1024, help="tokens per row (default: 1024)")
    parser.add_argument("--output_dir", type=Path, help="folder to create")
    parser.add_argument("--overwrite", action="store_true", help="replace the packed dataset in output_dir")
    parser.add_argument("--preprocessing_num_workers", type=int, help="threads that encode (default: one per core)")
    parser.add_argument("--num_shards", type=int, default=1, help="number of machines or jobs that share the work")
    parser.add_argument("--shard_index", type=int, help="number of this machine or job, from 0")
    parser.add_argument("--merge_shards", action="store_true", help="join the finished shards in output_dir")
    parser.add_argument("--inspect", type=Path, metavar="DIR", help="only print what a packed dataset holds")
    args = parser.parse_args()
    if args.inspect is not None:
        for name, value in vars(args).items():
            if name != "inspect" and value != parser.get_default(name):
                raise UserError(f"--inspect only reads a packed dataset, so --{name} has no effect; omit one of them")
        if args.inspect.is_dir() and not (args.inspect / "metadata.json").is_file():
            raise UserError(f"{args.inspect} is not a packed dataset; pass the --output_dir of a preparation")
        print_contents(open_packed_dataset(args.inspect))
        return
    if args.output_dir is None:
        raise UserError("pass --output_dir, the folder to create, or --inspect with the folder of a packed dataset")
    for name in ("block_size", "num_shards", "preprocessing_num_workers"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(f"{name} must be at least 1, got {getattr(args, name)}")
    directory = args.output_dir.absolute()
    if args.merge_shards:
        metadata = merge_shards(directory, args.num_shards)
        rows = ", ".join(f"{counts['rows']:,} {split} rows" for split, counts in metadata["splits"].items())
        print(f"joined {args.num_shards} shards in {directory}: {rows}; you can delete the shards", flush=True)
        dataset = open_packed_dataset(directory)
    else:
        if args.num_shards > 1:
            if args.shard_index is None:
                raise UserError("--num_shards needs --shard_index (0 to num_shards - 1), or --merge_shards at the end")
            directory = shard_dir(directory, args.shard_index, args.num_shards)
        if args.tokenizer_name is None:
            raise UserError("pass --tokenizer_name, a folder or Hub id; scripts/train_tokenizer.py creates one")
        source = dataclasses.replace(source_from(args), num_shards=args.num_shards, shard_index=args.shard_index or 0)
        tokenizer = read_tokenizer(args.tokenizer_name)
        workers = args.preprocessing_num_workers
        dataset = prepare_dataset(
            source, directory, args.block_size, tokenizer, overwrite=args.overwrite, num_workers=workers
        )
    if args.merge_shards or args.num_shards == 1:
        print_contents(dataset)
        print(f"train on it with: accelerate launch recipe/train.py --dataset_dir {args.output_dir}")


if __name__ == "__main__":
    run_main(main, "interrupted; run the same command again to resume")
