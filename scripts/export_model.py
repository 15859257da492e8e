"""Store a saved model in bf16 or int8, or prune it, and compare size and perplexity before and after.

python scripts/export_model.py --model runs/demo --dtype bf16 --output_dir runs/demo-bf16
python scripts/export_model.py --model runs/demo --quantize int8 --output_dir runs/demo-int8
python scripts/export_model.py --model runs/demo --prune 0.3 --output_dir runs/demo-pruned

--quantize int8: the matrices of the blocks, through bitsandbytes; from_pretrained loads the result. --prune: the
smallest weights of each of these matrices become zero, which changes neither size nor speed.
"""

import argparse
import importlib.util
import logging
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import nn
from torch.nn.utils import prune
from transformers import AutoConfig, BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.pytorch_utils import Conv1D

from recipe.arguments import CommandLine, as_path
from recipe.command_line import load_config
from recipe.config import CONFIG_NAME
from recipe.data.cache import open_dataset_for
from recipe.data.packed import PackedDataset, open_packed_dataset
from recipe.data.tokenizer import load_tokenizer
from recipe.disk import share, write_file
from recipe.errors import UserError, run_main
from recipe.evaluation.scoring import CPU_TOKENS
from recipe.evaluation.text import Text, choose_context, evaluate_dataset, evaluate_text, read_text
from recipe.hardware.devices import device_of
from recipe.model.files import TOKENIZER_FILES, own_files
from recipe.model.weights import load_model_weights, load_pretrained, write_config

MAX_TOKENS = 16_384  # 40 seconds per model for GPT-2 124M on one CPU core
CHARACTERS_PER_TOKEN = 4  # of English, roughly


def main() -> None:
    args = parse()
    tokenizer = load_tokenizer(str(args.model))
    device = device_of(PartialState())
    text = find_text(args, tokenizer)
    loading = {"device_map": {"": device}, "trust_remote_code": args.trust_remote_code}
    model = load_model_weights(args.model, **loading).eval()
    print_row(args.model, model, tokenizer, text)
    if args.prune is not None:
        for matrix in list_projections(model):
            prune.l1_unstructured(matrix, "weight", args.prune)
            prune.remove(matrix, "weight")
    if args.quantize:  # the conversion reads a saved model
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            model = load_as_int8(Path(folder), loading)
    if args.dtype:
        nn.Module.to(model, dtype=torch.bfloat16)
        model.config.dtype = torch.bfloat16
    model.save_pretrained(args.output_dir)
    write_config(model.config, args.output_dir)
    for path in args.output_dir.glob("*.safetensors"):
        share(path, args.output_dir / "config.json")  # safetensors 0.8 makes its files private
    for name, content in own_files(args.model, TOKENIZER_FILES).items():
        write_file(args.output_dir / name, content)
    exported = load_model_weights(args.output_dir, **loading).eval()  # as users do
    measured = print_row(args.output_dir, exported, tokenizer, text)
    print(f"\nPerplexity on {measured['num_tokens']:,} tokens of {measured['name']}.")


def list_projections(model: PreTrainedModel) -> list[Conv1D | nn.Linear]:
    """Return the blocks' projections; in GPT-2 they are `Conv1D`, which converters for `nn.Linear` silently skip."""
    return [module for module in model.base_model.modules() if isinstance(module, (Conv1D, nn.Linear))]


def load_as_int8(source: Path, loading: dict[str, Any]) -> PreTrainedModel:
    """Load a model with int8 matrices and the rest in float16 (LLM.int8(), arXiv 2208.07339).

    Raises `UserError` unless every matrix of the blocks has shrunk.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # 0.50 warns about a 4-bit kernel on CPUs
    options = {"quantization_config": BitsAndBytesConfig(load_in_8bit=True), "dtype": torch.float16}
    model = load_model_weights(source, **options, **loading).eval()
    sizes = [matrix.weight.element_size() for matrix in list_projections(model)]
    if set(sizes) != {1}:
        raise UserError(f"only {sizes.count(1)} of the {len(sizes)} matrices in {source} became int8")
    return model


def find_text(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> Text | PackedDataset:
    """Return the text to measure: what the options name, or the dataset of the model's own run."""
    if args.text_file is not None:
        return read_text(args.text_file, tokenizer, max_characters=CHARACTERS_PER_TOKEN * MAX_TOKENS)
    if args.dataset_dir is not None:
        num_positions = load_pretrained(AutoConfig, args.model).max_position_embeddings
        return open_packed_dataset(args.dataset_dir, choose_context(args.model, num_positions, None)[1])
    if not (args.model / CONFIG_NAME).is_file():
        raise UserError(f"{args.model} is not the folder of a run; pass --text_file or --dataset_dir")
    return open_dataset_for(load_config(["--config", str(args.model / CONFIG_NAME)]).config)


def print_row(
    directory: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, text: Text | PackedDataset
) -> dict[str, Any]:
    """Print size and perplexity, and return the scores."""
    if isinstance(text, Text):
        context = choose_context(directory, model.config.max_position_embeddings, None)[0]
        scores = evaluate_text(model, tokenizer, text, context, context, CPU_TOKENS)
    else:
        batch_size = max(1, CPU_TOKENS // text.block_size)
        max_rows = max(1, MAX_TOKENS // text.block_size)
        scores = evaluate_dataset(model, tokenizer, text, batch_size, max_rows)
    megabytes = sum(path.stat().st_size for path in directory.glob("*.safetensors")) / 1e6
    print(f"{directory!s:40} {megabytes:10,.2f} MB   perplexity {scores['perplexity']:,.3f}", flush=True)
    return scores


def parse() -> argparse.Namespace:
    parser = CommandLine(description="Store a saved model in bf16 or int8, or prune it; compare size and perplexity.")
    parser.add_argument("--model", type=Path, required=True, help="folder of a run or of a checkpoint")
    parser.add_argument("--output_dir", type=Path, required=True, help="folder for the new model; new or empty")
    stored = parser.add_mutually_exclusive_group()
    stored.add_argument("--dtype", choices=["bf16"], help="type of the weights (checkpoints have fp32)")
    stored.add_argument("--quantize", choices=["int8"], help='needs pip install -e ".[quantize]"')
    parser.add_argument("--prune", type=float, help="set this fraction of each matrix to zero: 0.3")
    parser.add_argument("--trust_remote_code", action="store_true", help="run the code that the model brings")
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--text_file", type=as_path, help="text for the perplexity (default: the run's validation text)")
    text.add_argument("--dataset_dir", type=Path, help="packed dataset whose validation rows give the perplexity")
    args = parser.parse_args()
    if args.quantize is None and args.prune is None and args.dtype is None:
        raise UserError("nothing to do: pass --dtype bf16, --quantize int8 or --prune 0.3")
    if args.quantize and importlib.util.find_spec("bitsandbytes") is None:
        raise UserError('--quantize needs bitsandbytes; run pip install -e ".[quantize]"')
    if args.prune is not None and not 0 < args.prune < 1:
        raise UserError(f"--prune is the fraction of weights to remove, between 0 and 1; got {args.prune}")
    if args.output_dir.exists() and any(args.output_dir.iterdir()):
        raise UserError(f"{args.output_dir} is not empty; pass another --output_dir")
    return args


if __name__ == "__main__":
    run_main(main, is_alone=True)
