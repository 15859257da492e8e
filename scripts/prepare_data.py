"""Text -> packed dataset on disk.

python scripts/prepare_data.py --train_file a.txt --tokenizer_name DIR_OR_ID --block_size 256 --output_dir DIR
"""

import argparse
from pathlib import Path

from recipe.config import UserError, run_main
from recipe.data.prepare import add_source_arguments, prepare_dataset, source_from
from recipe.data.tokenizer import load_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokenize and pack text for recipe/train.py --dataset_dir.")
    add_source_arguments(parser)
    parser.add_argument("--tokenizer_name", required=True, help="tokenizer folder or Hub id")
    parser.add_argument("--block_size", type=int, default=1024, help="tokens a row (default: 1024)")
    parser.add_argument("--output_dir", required=True, type=Path, help="folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace output_dir if it exists")
    parser.add_argument("--preprocessing_num_workers", type=int, help="threads that encode (default: all cores)")
    args = parser.parse_args()
    if args.block_size < 1:
        raise UserError(f"block_size must be at least 1, got {args.block_size}")
    source, tokenizer = source_from(args), load_tokenizer(args.tokenizer_name)
    prepare_dataset(
        source,
        args.output_dir,
        args.block_size,
        tokenizer,
        overwrite=args.overwrite,
        num_workers=args.preprocessing_num_workers,
    )
    print(
        f"train on it with: accelerate launch recipe/train.py --dataset_dir {args.output_dir} "
        f"--block_size {args.block_size}"
    )


if __name__ == "__main__":
    run_main(main)
