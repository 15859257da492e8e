"""Text -> packed dataset on disk.

python scripts/prepare_data.py --train_file a.txt --tokenizer_name DIR_OR_ID --block_size 256 --output_dir DIR
python scripts/prepare_data.py --inspect DIR
"""

from pathlib import Path

from recipe.arguments import CommandLine
from recipe.data.packed import open_packed_dataset
from recipe.data.prepare import add_source_arguments, prepare_dataset, print_contents, source_from
from recipe.data.tokenizer import read_tokenizer
from recipe.errors import UserError, run_main


def main() -> None:
    parser = CommandLine(description="Tokenize and pack text for recipe/train.py --dataset_dir.")
    add_source_arguments(parser)
    parser.add_argument("--tokenizer_name", help="tokenizer folder or Hub id")
    parser.add_argument("--block_size", type=int, default=1024, help="tokens per row (default: 1024)")
    parser.add_argument("--output_dir", type=Path, help="folder to create")
    parser.add_argument("--overwrite", action="store_true", help="replace the packed dataset in output_dir")
    parser.add_argument("--preprocessing_num_workers", type=int, help="processes (default: one per core)")
    parser.add_argument("--num_shards", type=int, default=1, help="number of jobs that share the work")
    parser.add_argument("--shard_index", type=int, help="number of this job, from 0")
    parser.add_argument("--finish", action="store_true", help="only complete what the jobs have prepared")
    parser.add_argument("--inspect", type=Path, metavar="DIR", help="only print what a packed dataset holds")
    args = parser.parse_args()
    if args.inspect is not None:
        for name, value in vars(args).items():
            if name != "inspect" and value != parser.get_default(name):
                raise UserError(f"--inspect only reads a packed dataset, so --{name} has no effect; omit one of them")
        print_contents(open_packed_dataset(args.inspect))
        return
    if args.output_dir is None:
        raise UserError("pass --output_dir, the folder to create, or --inspect with the folder of a packed dataset")
    for name in ("block_size", "num_shards", "preprocessing_num_workers"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(f"{name} must be at least 1, got {getattr(args, name)}")
    is_array = args.num_shards > 1 or args.shard_index is not None
    if is_array and not args.finish and args.shard_index not in range(args.num_shards):
        raise UserError(
            f"the jobs of an array need --num_shards N and --shard_index 0 to N - 1; got {args.shard_index}"
        )
    if args.tokenizer_name is None:
        raise UserError("pass --tokenizer_name, a folder or Hub id; scripts/train_tokenizer.py creates one")
    source = source_from(args)
    dataset = prepare_dataset(
        source,
        args.output_dir.absolute(),
        args.block_size,
        read_tokenizer(args.tokenizer_name),
        overwrite=args.overwrite,
        num_workers=args.preprocessing_num_workers,
        share=slice(0) if args.finish else slice(args.shard_index, None, args.num_shards),
    )
    if dataset is not None:
        print_contents(dataset)
        print(f"train on it with: accelerate launch recipe/train.py --dataset_dir {args.output_dir}")
    elif args.finish:
        raise UserError("run the jobs of the units that are not done, with the same options")


if __name__ == "__main__":
    run_main(main, "interrupted; run the same command again to resume")
