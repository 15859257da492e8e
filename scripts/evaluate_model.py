"""Evaluate a saved model: loss over any text, HellaSwag, LAMBADA, and the tasks of lm-eval.

python scripts/evaluate_model.py --model DIR_OR_ID --text_file TEXT.txt --tasks hellaswag,lambada
"""

import argparse
import functools
import time
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from recipe.arguments import CommandLine
from recipe.config import EVAL_TASKS, parse_tasks
from recipe.data.packed import open_packed_dataset
from recipe.data.tokenizer import load_tokenizer
from recipe.environment import describe_environment
from recipe.errors import UserError, run_main
from recipe.evaluation.harness import open_tasks, run_harness
from recipe.evaluation.reference import REFERENCES
from recipe.evaluation.report import choose_output_file, describe_results, write_results
from recipe.evaluation.scoring import CPU_TOKENS, GPU_TOKENS
from recipe.evaluation.sliding_window import evaluate_text, read_text, read_validation_split
from recipe.evaluation.tasks import load_tasks
from recipe.hardware.processes import on_main_process, start_processes, use_all_cores
from recipe.model.attention import SDPA_WITHOUT_MASK, check_decoder, check_model_type
from recipe.model.weights import check_vocabulary, load_pretrained


def parse_arguments() -> argparse.Namespace:
    parser = CommandLine(description="Evaluate a saved GPT-2 model on texts and tasks.")
    parser.add_argument("--model", "--model_name_or_path", required=True, help="folder of a model, or a Hub id")
    parser.add_argument("--revision", help="branch, tag or commit of a Hub id")
    parser.add_argument("--dataset_dir", type=Path, help="packed dataset, whose validation split is evaluated")
    parser.add_argument("--text_file", nargs="+", default=[], help="text files, folders or globs: one result for each")
    parser.add_argument("--text_column_name", default="text", help="column of the text (default: text)")
    parser.add_argument("--document_separator", help="separates documents within .txt files")
    parser.add_argument("--stride", type=int, help="new tokens per window (default: half of the context)")
    parser.add_argument("--tasks", nargs="+", help=f"{', '.join(EVAL_TASKS)} (from the Hub), or hellaswag=FILE.jsonl")
    parser.add_argument("--max_task_examples", type=int, help="score only the first N of a fixed random order")
    parser.add_argument("--harness", nargs="+", help="tasks of lm-eval, which the extra lm_eval installs")
    parser.add_argument("--batch_size", type=int, help="sequences of full length per forward pass")
    parser.add_argument("--output_file", help="JSON file (default: evaluation.json in the folder of the model)")
    args = parser.parse_args()
    for name in ("batch_size", "max_task_examples"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(f"{name} must be at least 1, got {getattr(args, name)}")
    args.harness = tuple(name for item in args.harness or [] for name in item.split(",") if name)
    if not (args.dataset_dir or args.text_file or args.tasks or args.harness):
        raise UserError("nothing to evaluate; pass --dataset_dir, --text_file, --tasks or --harness")
    if args.revision and Path(args.model).is_dir():
        raise UserError(f"--revision applies to a Hub id, but {args.model} is a folder")
    parse_tasks(args.tasks)
    return args


def load_model(args: argparse.Namespace, config: PreTrainedConfig, device: torch.device) -> PreTrainedModel:
    options = {"output_loading_info": True, "dtype": torch.float32, "attn_implementation": SDPA_WITHOUT_MASK}
    model, loaded = load_pretrained(AutoModelForCausalLM, args.model, revision=args.revision, config=config, **options)
    if missing := sorted(loaded["missing_keys"]):
        raise UserError(f"the model in {args.model} lacks weights: {', '.join(missing[:3])}")
    return model.to(device).eval()


def main() -> None:
    # ------------------------------------------------------------------ everything that can be wrong, before the model
    args = parse_arguments()
    start_processes()
    state = PartialState()
    use_all_cores(state)
    output_file = choose_output_file(args.model, args.output_file)
    config = load_pretrained(AutoConfig, args.model, revision=args.revision)
    if config.model_type != "gpt2":
        check_model_type(config.model_type)
        check_decoder(config, config.max_position_embeddings)
    context = config.max_position_embeddings
    # Half: every token sees half of the context or more, at twice the cost of windows that do not overlap.
    stride = max(1, context // 2) if args.stride is None else args.stride
    if not 1 <= stride <= context:
        raise UserError(f"stride must be from 1 to {context}, the context of {args.model}, got {stride}")
    tokenizer = load_tokenizer(args.model, args.revision)
    check_vocabulary(len(tokenizer), config.vocab_size, args.model)
    options = {"text_column_name": args.text_column_name, "separator": args.document_separator}
    readers = [functools.partial(read_text, given, tokenizer, **options) for given in args.text_file]
    if args.dataset_dir:
        readers.insert(0, lambda: read_validation_split(open_packed_dataset(args.dataset_dir), tokenizer))
    texts = [on_main_process(reader) for reader in readers]
    tasks = load_tasks(args.tasks, tokenizer, context)
    if args.harness:
        on_main_process(lambda: open_tasks(args.harness) and None)

    # ------------------------------------------------------------------ evaluate
    model = load_model(args, config, state.device)
    tokens = CPU_TOKENS if state.device.type == "cpu" else GPU_TOKENS
    batch_size = args.batch_size or max(1, tokens // context)
    harness = functools.partial(run_harness, model, tokenizer, args.harness, batch_size, args.max_task_examples)
    results = {
        "model": Path(args.model).absolute().name if Path(args.model).is_dir() else args.model,
        "revision": args.revision,
        "commit": getattr(config, "_commit_hash", None),  # Transformers sets it for a Hub id
        "num_parameters": model.num_parameters(),
        "texts": [evaluate_text(model, text, context, stride, batch_size * context) for text in texts],
        "tasks": {
            task.name: {
                **task.run(model, config.vocab_size, batch_size * context, args.max_task_examples),
                "source": task.source,
            }
            for task in tasks
        },
        "harness": on_main_process(harness) if args.harness else {},
        "reference": [reference._asdict() for reference in REFERENCES],
        "num_processes": state.num_processes,
        "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "environment": describe_environment(state.device),
    }
    if state.is_main_process:
        print(describe_results(results))
        try:
            if output_file is not None:
                write_results(results, output_file)
                print(f"\nwritten to {output_file}")
        except OSError as error:  # the results are on the screen
            print(f"\nwarning: could not write {output_file}: {error.strerror}; pass --output_file")
    on_main_process(lambda: None)  # no process ends while another still needs it
    state.destroy_process_group()


if __name__ == "__main__":
    run_main(main)
