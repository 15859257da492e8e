"""Compare optimizers and schedules: loss against tokens and seconds, each with its own tuned learning rate.

python scripts/benchmarks/compare_optimizers.py --output_file scripts/benchmarks/optimizers_demo_cpu.json
python scripts/benchmarks/compare_optimizers.py --output_file FILE.json --sides adamw_zero muon --train_file TEXT \
    --config_overrides n_layer=6,n_head=5,n_embd=320 --max_steps 800 --global_batch_size 16

Accepts the options of recipe/train.py, which all runs share. Every side trains once with each learning rate of its
grid, then with the other seeds at the best two. Muon also trains on fewer tokens, and AdamW's best side on more, to
find out how many tokens each needs for the loss of the other. Results are saved after each run, and the same command
continues an interrupted comparison; more rates, seeds, lengths and sides can be added. A table appears beside the
JSON; scripts/draw_charts.py draws the charts.
"""

import argparse
import json
import tempfile
from pathlib import Path

from recipe.arguments import CommandLine
from recipe.benchmark.measure import end_programs, finish_results, replace_file, to_arguments
from recipe.benchmark.optimizers import Comparison, Run, Side, build_sides, summarize, to_markdown
from recipe.command_line import load_config
from recipe.data.prepare import open_dataset_for
from recipe.errors import UserError, run_main

EVALUATED_ROWS = 64  # on the way; the final loss is that of all validation rows


def main() -> None:
    args, options = parse()
    arguments = ["--config", args.config, *options]
    config = load_config(arguments)[0]
    setting = {"recipe": args.config, "options": options, "max_steps": config.max_steps}
    setting |= {"seed": args.seeds[0], "decay": args.decay}
    results = setting | {"sides": {}, "runs": {}, "tokens_per_second": {}}
    if args.output_file.exists():
        results = json.loads(args.output_file.read_text())
        if changed := [key for key, value in setting.items() if results[key] != value]:
            raise UserError(f"{args.output_file} has other {', '.join(changed)}; choose another --output_file")
    sides = {name: side for name, side in build_sides(args.decay).items() if name in args.sides}
    results["sides"] |= {name: side.what for name, side in sides.items()}

    def save() -> None:
        results["summary"] = summarize(results)
        replace_file(args.output_file, lambda path: finish_results(results, path))
        replace_file(args.output_file.with_suffix(".md"), lambda path: path.write_text(to_markdown(results)))

    evaluation = {"eval_steps": max(1, config.max_steps // args.evaluations), "eval_on_start": False}
    evaluation |= {"max_eval_samples": EVALUATED_ROWS, "exact_final_eval": True}
    with tempfile.TemporaryDirectory() as work:
        dataset_dir = open_dataset_for(config).directory  # prepared once, before the runs
        arguments += to_arguments(evaluation)
        comparison = Comparison(arguments, dataset_dir, Path(work), args.jobs, results, save)
        try:
            if args.time:
                comparison.time(sides.values(), args.time)
            else:
                compare(comparison, sides, args, config.max_steps)
        finally:
            end_programs()
    print(to_markdown(results))


def compare(comparison: Comparison, sides: dict[str, Side], args: argparse.Namespace, max_steps: int) -> None:
    """Tune each side, repeat it with the other seeds, and train Muon for fewer steps and AdamW for more."""
    first, *others = args.seeds
    rates = {"learning_rate": args.adamw_rates, "muon_learning_rate": args.muon_rates}
    comparison.train(Run(side, rate, first, max_steps) for side in sides.values() for rate in rates[side.rate_option])
    grids = {row["side"]: row["grid"] for row in summarize(comparison.results)["rows"] if row["side"] in sides}
    repeated = {name: sorted(grid, key=grid.get)[: args.repeated_rates] for name, grid in grids.items()}
    comparison.train(
        Run(sides[name], float(rate), seed, max_steps)
        for seed in others
        for name, rates in repeated.items()
        for rate in rates
    )
    best = {row["side"]: row["learning_rate"] for row in summarize(comparison.results)["rows"]}
    for factor in args.lengths:
        name = "muon" if factor < 1 else summarize(comparison.results).get("best_adamw")
        if name in sides:
            scales = (1.0,) if factor < 1 else (1.0, 0.5)  # longer runs may prefer lower rates
            num_steps = round(factor * max_steps)
            comparison.train(Run(sides[name], scale * best[name], first, num_steps) for scale in scales)


def parse() -> tuple[argparse.Namespace, list[str]]:
    names = list(build_sides(0.8))
    parser = CommandLine(description="Compare optimizers and schedules. Accepts the options of recipe/train.py, too.")
    parser.add_argument("--output_file", type=Path, required=True, help="JSON to write, or to continue")
    parser.add_argument("--config", default="demo", help="recipe of all runs (default: demo)")
    parser.add_argument("--sides", nargs="+", choices=names, default=names, help="default: all")
    parser.add_argument(
        "--adamw_rates", type=float, nargs="+", default=[2e-3, 4e-3, 8e-3], help="values of learning_rate for AdamW"
    )
    parser.add_argument(
        "--muon_rates", type=float, nargs="+", default=[5e-3, 1e-2, 2e-2], help="values of muon_learning_rate"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1337, 1338, 1339], help="default: 1337 1338 1339")
    parser.add_argument(
        "--repeated_rates", type=int, default=2, help="best rates to repeat with all seeds (default: 2)"
    )
    parser.add_argument("--decay", type=float, default=0.8, help="share of the run that decays to zero (default: 0.8)")
    parser.add_argument(
        "--lengths",
        type=float,
        nargs="*",
        default=[0.25, 0.375, 0.5, 2.0],
        help="lengths of further runs, of Muon below 1 and of AdamW above (default: 0.25 0.375 0.5 2)",
    )
    parser.add_argument("--evaluations", type=int, default=12, help="points of each loss curve (default: 12)")
    parser.add_argument(
        "--jobs", type=int, default=1, help="runs at a time, each on its share of the CPUs (default: 1)"
    )
    parser.add_argument("--time", type=int, metavar="ROUNDS", help="only measure each side's speed, in alternation")
    args, options = parser.parse_with_run_options()
    if len(args.adamw_rates) != len(args.muon_rates):
        raise UserError("--adamw_rates and --muon_rates must be equally many, so that both are tuned alike")
    if min(*args.adamw_rates, *args.muon_rates, *args.lengths, args.evaluations, args.jobs) <= 0 or 1 in args.lengths:
        raise UserError("rates, --lengths, --evaluations and --jobs must be above 0, and a length not 1")
    if not 0 < args.decay < 1:
        raise UserError(f"--decay must be a share between 0 and 1, got {args.decay:g}")
    if args.time is not None and args.time < 1:
        raise UserError(f"--time must be at least 1, got {args.time}")
    if not args.output_file.absolute().parent.is_dir():
        raise UserError(f"the folder of --output_file {args.output_file} does not exist")
    return args, options


if __name__ == "__main__":
    run_main(main, "interrupted; the same command continues the comparison")
