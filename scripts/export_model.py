"""Prune a saved model or quantize it to int8, and measure what that costs.

python scripts/export_model.py --model runs/demo --quantize int8 --output_dir runs/demo-int8
"""

import argparse
import json
import math
import textwrap
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from recipe.command_line import CommandLine, load_config
from recipe.data.packed import PackedDataset, open_packed_dataset
from recipe.data.prepare import open_dataset_for
from recipe.data.tokenizer import load_tokenizer, tokenizer_sha256
from recipe.environment import describe_environment
from recipe.errors import UserError, run_main, short_reason
from recipe.model.weights import load_pretrained
from recipe.publish.compress import (
    append_to_card,
    check_request,
    compress_model,
    describe_changes,
    loss_over_windows,
    measure_models,
)

MAX_TOKENS = 16_384  # of text: 40 seconds per model for GPT-2 124M on one CPU core
PROMPT_TOKENS = 16
ROWS = {
    "disk_bytes": ("weights on disk, MB", 1e-6, ",.2f"),
    "memory_bytes": ("weights in memory, MB", 1e-6, ",.2f"),
    "tokens_per_second": ("generated tokens/s", 1, ",.1f"),
    "loss": ("loss, nats per token", 1, ".4f"),
    "perplexity": ("perplexity", 1, ",.3f"),
}


def main() -> None:
    parser = CommandLine(description="Prune a saved model or quantize it to int8, and measure what that costs.")
    parser.add_argument("--model", type=Path, required=True, help="folder of a run or of a checkpoint")
    parser.add_argument("--output_dir", type=Path, required=True, help="folder for the compressed model; new or empty")
    parser.add_argument("--quantize", choices=["int8"], help="store the projections' weights as int8 (bitsandbytes)")
    parser.add_argument("--prune", type=float, help="set this fraction of each projection's weights to zero: 0.3")
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--text_file", type=Path, help="UTF-8 text for the perplexity (default: the run's validation)")
    text.add_argument("--dataset_dir", type=Path, help="packed dataset whose validation rows give the perplexity")
    args = parser.parse_args()
    check_request(args.model, args.output_dir, args.quantize, args.prune)
    tokenizer, device = load_tokenizer(str(args.model)), PartialState().device
    windows, text = find_windows(args, tokenizer)
    facts = compress_model(args.model, tokenizer, args.output_dir, args.quantize is not None, args.prune, device)
    directories = {"before": args.model, "after": args.output_dir}
    models = {  # as a user loads them
        name: load_pretrained(AutoModelForCausalLM, path, device_map={"": device}).eval()
        for name, path in directories.items()
    }
    prompt = windows[0][:PROMPT_TOKENS] if windows else torch.tensor([tokenizer.eos_token_id])
    results = measure_models(models, directories, prompt[None])
    if windows:
        for name, model in models.items():
            loss = loss_over_windows(model, windows)
            results[name] |= {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}
    table, changes = make_table(results), describe_changes(facts, models["after"].config)
    sentences = textwrap.fill(f"{changes} {text}", 80, break_long_words=False, break_on_hyphens=False)
    print(f"\n{table}\n\n{sentences}\nThe model is in {args.output_dir}.")
    report = {**facts, **results, "text": text, "environment": describe_environment(device)}
    (args.output_dir / "export.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    append_to_card(args.model, args.output_dir, f"## Compressed\n\n{changes}\n\n{table}\n\n{text}")


def find_windows(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> tuple[list[torch.Tensor], str]:
    """Return the text to measure as disjoint windows of up to block_size + 1 ids, and a sentence about it.

    Without an option it is the validation text of the run in the model's folder. Returns no windows, and the reason,
    if there is none.
    """
    block_size = load_pretrained(AutoConfig, args.model).max_position_embeddings
    if args.text_file is not None:
        return windows_of_file(args.text_file, tokenizer, block_size)
    if args.dataset_dir is not None:
        return windows_of_dataset(open_packed_dataset(args.dataset_dir), tokenizer, block_size)
    reason, run = f"{args.model.name} is not the folder of a run", args.model / "training_config.yaml"
    if run.is_file():
        try:
            return windows_of_dataset(open_dataset_for(load_config(["--config", str(run)])[0]), tokenizer, block_size)
        except UserError as error:
            reason = str(error)
    return [], f"Perplexity was not measured: {reason}; pass --text_file or --dataset_dir."


def windows_of_file(path: Path, tokenizer: PreTrainedTokenizerBase, block_size: int) -> tuple[list[torch.Tensor], str]:
    """Cut a text into windows that share one id with the previous one, so every token is a target once."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path} as UTF-8 text: {short_reason(error)}") from error
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]  # verbose warns about long texts
    if not ids:
        raise UserError(f"{path} is empty; pass a text to measure")
    stream = torch.tensor([tokenizer.eos_token_id, *ids[:MAX_TOKENS]])
    windows = [stream[start : start + block_size + 1] for start in range(0, len(stream) - 1, block_size)]
    return windows, f"Loss and perplexity: {len(stream) - 1:,} of {len(ids):,} tokens of {path.name}."


def windows_of_dataset(
    dataset: PackedDataset, tokenizer: PreTrainedTokenizerBase, block_size: int
) -> tuple[list[torch.Tensor], str]:
    """Return validation rows, spread evenly. Raises `UserError` if the model cannot read the dataset."""
    if dataset.metadata["tokenizer_sha256"] != tokenizer_sha256(tokenizer):
        raise UserError(f"{dataset.directory} was made with another tokenizer than the model's")
    if dataset.block_size > block_size:
        raise UserError(f"the rows of {dataset.directory} have {dataset.block_size} tokens, the model {block_size}")
    split = dataset.splits["validation"]
    num_rows = min(len(split), max(1, MAX_TOKENS // dataset.block_size))
    rows = torch.from_numpy(split[np.arange(num_rows) * len(split) // num_rows])
    return list(rows), f"Loss and perplexity: {num_rows:,} of {len(split):,} validation rows of the dataset."


def make_table(results: dict[str, dict[str, float]]) -> str:
    """Return the measurements as a Markdown table of 70 columns."""
    lines = [f"| {'':22} | {'before':>12} | {'after':>12} | {'ratio':>8} |", "|---|---:|---:|---:|"]
    for key, (label, scale, style) in ROWS.items():
        if key in results["before"]:
            before, after = results["before"][key], results["after"][key]
            values = [f"{value * scale:{style}}" for value in (before, after)]
            lines.append(f"| {label:22} | {values[0]:>12} | {values[1]:>12} | {after / before:8.3f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    run_main(main)
