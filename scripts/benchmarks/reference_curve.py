"""Replace the runs of a reference, with which "Is my loss normal?" compares, by those of finished runs.

python scripts/benchmarks/reference_curve.py --reference_file recipe/run/references/demo.json runs/demo runs/demo-2

The losses of runs of equal length, with different seeds, are averaged. All other fields of the file stay: edit them by
hand if the model, the batch, the optimizer or the schedule changes, and choose a band well above the spread of seeds.
"""

import json
import re
import statistics
from pathlib import Path

from recipe.arguments import CommandLine
from recipe.errors import UserError, run_main
from recipe.publish.facts import read_facts

LIST = re.compile(r"[\[{]\s[^\[\]{}]*[\]}]")  # without lists or dictionaries in it


def main() -> None:
    parser = CommandLine(description="Replace the runs of a reference by those of finished runs.")
    parser.add_argument("--reference_file", type=Path, required=True, help="file in recipe/run/references")
    parser.add_argument("runs", type=Path, nargs="+", help="output folders of finished runs")
    args = parser.parse_args()
    reference = json.loads(args.reference_file.read_text(encoding="utf-8"))
    losses: dict[int, dict[int, list[float]]] = {}  # {tokens of the run: {tokens seen: [loss of each run]}}
    for run_dir in args.runs:
        if not (path := run_dir / "summary.json").is_file():
            raise UserError(f"{path} does not exist; pass the output folders of finished runs")
        summary = json.loads(path.read_text(encoding="utf-8"))
        facts = read_facts(run_dir, summary["step"])
        tokens_per_step = summary["tokens_seen"] // summary["step"]
        run = {**facts.options, **facts.data, **facts.start["model"], "tokens_per_step": tokens_per_step}
        for key, allowed in reference["applies_to"].items():
            if run.get(key) is not None and run[key] not in allowed:
                raise UserError(f"{run_dir} has {key} {run[key]}, but {args.reference_file} applies to {allowed}")
        curve = losses.setdefault(summary["tokens_seen"], {})
        for event in facts.of_kind("eval"):
            if event["step"]:
                curve.setdefault(event["step"] * tokens_per_step, []).append(event["loss"])
    reference["runs"] = [
        [[tokens, round(statistics.fmean(found), 4)] for tokens, found in sorted(curve.items())]
        for _, curve in sorted(losses.items())
    ]
    for last, curve in sorted(losses.items()):
        print(f"{last:,} tokens: {len(curve[last])} runs end at {min(curve[last]):.4f} to {max(curve[last]):.4f}")
    text = json.dumps(reference, indent=2, ensure_ascii=False)
    text = LIST.sub(lambda found: re.sub(r"(?<=[\[{])\s+|\s+(?=[\]}])", "", re.sub(r"\s+", " ", found[0])), text)
    args.reference_file.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_main(main)
