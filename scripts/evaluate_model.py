"""Evaluate a saved model: loss over any text, and the tasks of lm-eval. Or all checkpoints of a run, as a curve.

python scripts/evaluate_model.py --model DIR_OR_ID --text_file TEXT.txt --tasks hellaswag,lambada_openai
python scripts/evaluate_model.py --model RUN --checkpoints --tasks arc_easy --limit 500
"""

import argparse
import functools
import time
from pathlib import Path
from typing import Any

from recipe.arguments import CommandLine, as_path  # first: it sets up OpenMP's threads, before torch is loaded

# isort: split
from accelerate import PartialState

from recipe.checkpoint import STATE_NAME, checkpoint_step, list_checkpoints
from recipe.config import CONFIG_NAME
from recipe.data.packed import open_packed_dataset
from recipe.environment import describe_environment
from recipe.errors import UserError, run_main
from recipe.evaluation.generation import load_model
from recipe.evaluation.report import append_evaluation, describe_results, draw_scores, read_evaluations
from recipe.evaluation.scoring import CPU_TOKENS, GPU_TOKENS
from recipe.evaluation.tasks import check_tasks, score_tasks
from recipe.evaluation.text import LONGEST_CONTEXT, choose_context, evaluate_dataset, evaluate_text, read_text
from recipe.hardware.devices import device_of
from recipe.hardware.processes import on_main_process, start_processes, use_all_cores
from recipe.model.files import hub_commit
from recipe.publish.card import EVALUATION_NAME, weights_sha256

EXAMPLE_TOKENS = 256  # of a task, with its padding


def parse_arguments() -> argparse.Namespace:
    parser = CommandLine(description="Evaluate a saved GPT-2 model on texts and tasks.")
    parser.add_argument(
        "--model", "--model_name_or_path", required=True, type=as_path, help="folder of a model, or a Hub id"
    )
    parser.add_argument("--revision", help="branch, tag or commit of a Hub id")
    parser.add_argument("--trust_remote_code", action="store_true", help="run the code that the model brings")
    parser.add_argument(
        "--checkpoints",
        action="store_true",
        help="evaluate every checkpoint of the run in --model, and draw the curve",
    )
    parser.add_argument("--dataset_dir", type=Path, help="packed dataset, whose validation rows are evaluated")
    parser.add_argument(
        "--text_file", nargs="+", type=as_path, default=[], help="text files, folders or globs: one result for each"
    )
    parser.add_run_options(("text_column_name", "document_separator"))
    parser.add_argument(
        "--context",
        type=int,
        help=f"tokens that the model sees (default: its positions, at most {LONGEST_CONTEXT:,}; rows: as in its run)",
    )
    parser.add_argument("--stride", type=int, help="new tokens per window of text (default: half of the context)")
    parser.add_argument(
        "--tasks", nargs="+", type=as_path, default=[], help="lm-eval's tasks, or task.yaml files in its format"
    )
    parser.add_argument("--limit", type=int, help="score only the first N examples of each task")
    parser.add_argument("--batch_size", type=int, help="sequences of full length per forward pass")
    parser.add_argument("--output_file", type=Path, help="JSON file (default: evaluation.json in the folder of a run)")
    args = parser.parse_args()
    for name in ("batch_size", "limit"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(f"{name} must be at least 1, got {getattr(args, name)}")
    if not (args.dataset_dir or args.text_file or args.tasks):
        raise UserError("nothing to evaluate; pass --dataset_dir, --text_file or --tasks")
    if args.output_file is not None and (args.output_file.is_dir() or not args.output_file.parent.is_dir()):
        raise UserError(f"cannot write {args.output_file}: pass a file in an existing folder as --output_file")
    if args.output_file is not None:
        read_evaluations(args.output_file)  # raises for another file
    if args.checkpoints and not list_checkpoints(Path(args.model)):
        raise UserError(f"there are no checkpoints in {args.model}; pass the folder of a run")
    if args.checkpoints and args.output_file:
        raise UserError("--checkpoints writes the scores into the checkpoints' folders; omit --output_file")
    args.tasks = [name.strip() for item in args.tasks for name in item.split(",")]
    return args


def main() -> None:
    args = parse_arguments()
    start_processes()
    state = PartialState()
    use_all_cores(state)
    if args.tasks:
        on_main_process(lambda: check_tasks(args.tasks))
    if args.checkpoints:
        run_dir = Path(args.model).absolute()
        found = {checkpoint_step(path): evaluate(args, str(path), state) for path in list_checkpoints(run_dir)}
        if state.is_main_process:
            draw_scores(found, run_dir.name, run_dir / "scores.png")
            print(f"drawn to {run_dir / 'scores.png'}")
    else:
        evaluate(args, args.model, state)
    on_main_process(lambda: None)  # no process ends while another still needs it
    state.destroy_process_group()


def evaluate(args: argparse.Namespace, source: str, state: PartialState) -> dict[str, Any]:
    """Evaluate a model, print the results, append them to a file, and return them."""
    device = device_of(state)
    model, tokenizer = load_model(source, device, args.revision, args.trust_remote_code)
    context, row_length, rule = choose_context(source, model.config.max_position_embeddings, args.context)
    # Only in the folder of a model of this recipe, whose card shows the scores; other folders stay as they are.
    is_own = any((Path(source) / name).is_file() for name in (CONFIG_NAME, STATE_NAME))
    output_file = args.output_file or (Path(source) / EVALUATION_NAME if is_own else None)
    # Half: every token sees half of the context or more, at twice the cost of windows that do not overlap.
    stride = max(1, context // 2) if args.stride is None else args.stride
    if not 1 <= stride <= context:
        raise UserError(f"stride must be from 1 to {context}, the context of {source}, got {stride}")
    options = {"text_column_name": args.text_column_name, "document_separator": args.document_separator}
    readers = [functools.partial(read_text, path, tokenizer, **options) for path in args.text_file]
    texts = [on_main_process(reader) for reader in readers]
    tokens = CPU_TOKENS if device.type == "cpu" else GPU_TOKENS
    batch_size = args.batch_size or max(1, tokens // context)
    tokens_per_batch = batch_size * context
    scores_of_texts = []
    if args.dataset_dir:
        dataset = open_packed_dataset(args.dataset_dir, row_length)
        scores_of_rows = evaluate_dataset(model, tokenizer, dataset, max(1, tokens_per_batch // row_length))
        scores_of_texts.append({**scores_of_rows, "context_is": rule})
    for text in texts:
        scores_of_texts.append(evaluate_text(model, tokenizer, text, context, stride, tokens_per_batch))
    results: dict[str, Any] = {
        "model": Path(source).absolute().name if Path(source).is_dir() else source,
        "revision": args.revision,
        "commit": None if Path(source).is_dir() else hub_commit(source, args.revision),
        "weights_sha256": weights_sha256(Path(source)),  # by which a model card knows them
        "num_parameters": model.num_parameters(),
        "texts": scores_of_texts,
        "tasks": {},
    }
    loading = {"dtype": model.dtype, "trust_remote_code": args.trust_remote_code}
    if args.revision is not None:
        loading["revision"] = args.revision
    del model  # lm-eval loads it again
    if args.tasks:
        rows = args.batch_size or tokens // EXAMPLE_TOKENS
        results["tasks"] = score_tasks(source, args.tasks, args.limit, batch_size=rows, **loading)
    results["num_processes"] = state.num_processes
    results["finished_at"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    results["environment"] = describe_environment(device)
    if state.is_main_process:
        print(describe_results(results))
        try:
            if output_file is not None:
                append_evaluation(results, output_file)
                print(f"\nwritten to {output_file}")
        except OSError as error:  # the results are on the screen
            print(f"\nwarning: could not write {output_file}: {error.strerror}; pass --output_file")
    return results


if __name__ == "__main__":
    run_main(main)
