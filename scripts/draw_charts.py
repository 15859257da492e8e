"""Draw the README's charts from the result files, each as NAME.png for light and NAME_dark.png for dark pages.

python scripts/draw_charts.py
python scripts/draw_charts.py --demo_run runs/demo    # copies that run's loss and summary to the result files first
"""

import json
from functools import partial
from pathlib import Path

from recipe.arguments import CommandLine
from recipe.benchmark.charts import import_run, save_ladder_chart, save_optimizer_chart
from recipe.environment import describe_machine
from recipe.errors import UserError, run_main
from recipe.publish.curve import save_loss_chart


def main() -> None:
    parser = CommandLine(description="Draw the charts of the README.")
    parser.add_argument("--demo_run", type=Path, help="output_dir of a finished run of the demo, to record and draw")
    parser.add_argument("--results_dir", type=Path, default=Path(__file__).parent / "benchmarks", help="result files")
    args = parser.parse_args()
    demo = args.results_dir / "demo_cpu.json"
    if args.demo_run:
        if not (args.demo_run / "summary.json").is_file():
            raise UserError(f"{args.demo_run} has no summary.json; pass the output_dir of a finished run")
        import_run(args.demo_run, demo)
    summary = json.loads(demo.read_text())
    events = [json.loads(line) for line in demo.with_suffix(".jsonl").read_text().splitlines()]
    title = f"The demo: {summary['wall_seconds']:.0f} s on {describe_machine(summary['environment'])}"
    charts = {demo: partial(save_loss_chart, events, title=title)}
    for path in sorted(args.results_dir.glob("ladder_*.json")):
        charts[path] = partial(save_ladder_chart, json.loads(path.read_text()))
    for path in sorted(args.results_dir.glob("optimizers_*.json")):
        results = json.loads(path.read_text())
        if "comparison" not in results["summary"]:  # of AdamW and Muon
            continue
        charts[path] = partial(save_optimizer_chart, results)
        if results["tokens_per_second"]:
            charts[path.with_stem(f"{path.stem}_seconds")] = partial(save_optimizer_chart, results, seconds=True)
    for path, save_chart in charts.items():
        for dark in (False, True):
            image = path.with_name(f"{path.stem}{'_dark' * dark}.png")
            save_chart(path=image, dark=dark)
            print(image)


if __name__ == "__main__":
    run_main(main)
