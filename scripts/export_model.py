"""Prune a saved model or quantize it to int8, and measure what that costs.

python scripts/export_model.py --model runs/demo --quantize int8 --output_dir runs/demo-int8
"""

import argparse
import json
import textwrap
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from recipe.arguments import CommandLine
from recipe.checkpoint.save import CONFIG_NAME
from recipe.command_line import load_config
from recipe.data.packed import open_packed_dataset
from recipe.data.prepare import open_dataset_for
from recipe.data.tokenizer import load_tokenizer
from recipe.environment import describe_environment
from recipe.errors import UserError, run_main
from recipe.evaluation.scoring import CPU_TOKENS
from recipe.evaluation.sliding_window import TokenizedText, evaluate_text, read_text, read_validation_split
from recipe.model.weights import check_vocabulary, load_pretrained
from recipe.publish.compress import (
    append_to_card,
    check_request,
    compress_model,
    describe_changes,
    measure_models,
)
from recipe.publish.public import public_text

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
    text.add_argument("--text_file", help="text for the perplexity (default: the run's validation text)")
    text.add_argument("--dataset_dir", type=Path, help="packed dataset whose validation rows give the perplexity")
    args = parser.parse_args()
    check_request(args.model, args.output_dir, args.quantize, args.prune)
    tokenizer, device = load_tokenizer(str(args.model)), PartialState().device
    check_vocabulary(len(tokenizer), load_pretrained(AutoConfig, args.model).vocab_size, args.model)
    text, about_text = find_text(args, tokenizer)
    facts = compress_model(args.model, tokenizer, args.output_dir, args.quantize is not None, args.prune, device)
    directories = {"before": args.model, "after": args.output_dir}
    models = {  # as a user loads them
        name: load_pretrained(AutoModelForCausalLM, path, device_map={"": device}).eval()
        for name, path in directories.items()
    }
    prompt = [tokenizer.eos_token_id] if text is None else text.tokens[:PROMPT_TOKENS].astype("int64")
    results = measure_models(models, directories, torch.as_tensor(prompt)[None])
    if text is not None:
        for name, model in models.items():
            context = model.config.max_position_embeddings
            scores = evaluate_text(model, text, context, context, CPU_TOKENS)
            results[name] |= {key: scores[key] for key in ("loss", "perplexity")}
    table, changes = make_table(results), describe_changes(facts, models["after"].config)
    sentences = textwrap.fill(f"{changes} {about_text}", 80, break_long_words=False, break_on_hyphens=False)
    print(f"\n{table}\n\n{sentences}\nThe model is in {args.output_dir}.")
    report = {**facts, **results, "text": about_text, "environment": describe_environment(device)}
    (args.output_dir / "export.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    append_to_card(args.model, args.output_dir, f"## Compressed\n\n{changes}\n\n{table}\n\n{about_text}")


def find_text(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> tuple[TokenizedText | None, str]:
    """Return the text to measure, and a sentence about it.

    Without an option it is the validation text of the run in the model's folder. Returns None and the reason if there
    is none.
    """
    if args.text_file is not None:
        whole = read_text(args.text_file, tokenizer)
    elif args.dataset_dir is not None:
        whole = read_validation_split(open_packed_dataset(args.dataset_dir), tokenizer)
    else:
        reason, run = f"{args.model.name} is not the folder of a run", args.model / CONFIG_NAME
        if run.is_file():
            try:
                dataset = open_dataset_for(load_config(["--config", str(run)])[0])
                whole, reason = read_validation_split(dataset, tokenizer), None
            except UserError as error:
                reason = public_text(str(error))
        if reason is not None:
            return None, f"Perplexity was not measured: {reason}; pass --text_file or --dataset_dir."
    text = whole.head(MAX_TOKENS)
    return text, f"Loss and perplexity: {text.num_targets:,} of {whole.num_targets:,} tokens of {text.name}."


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
