"""Check that a run works on this machine, and what it takes, before it starts.

python scripts/check_environment.py                                       the demo
python scripts/check_environment.py --config gpt2_124m --dataset_dir DIR  GPT-2 124M
python scripts/check_environment.py --config gpt2_124m --measure          train a few steps instead of estimating

Each check prints one line: ok, a warning (the run works, but slower or with a part missing) or an error, with its
remedy. The exit status is 1 if there is an error.
"""

import argparse
import json
import shlex
import sys
import textwrap
from typing import TYPE_CHECKING, Any

try:
    from recipe.errors import run_main
except ModuleNotFoundError:
    sys.exit("error: the recipe is not installed; run pip install -e . in the folder that holds pyproject.toml")
from recipe.hardware.check import Finding, attempt, check_imports, check_packages, check_python

if TYPE_CHECKING:  # it imports torch, which may be missing
    from recipe.benchmark.preflight import Preflight

WIDTH, INDENT = 80, 21
WHOLE_WORDS = {"break_on_hyphens": False, "break_long_words": False}


def main() -> None:
    findings = {"Python": attempt(check_python), "Packages": attempt(check_packages)}
    if all(finding.status != "error" for finding in findings.values()):
        args, options, has_data = parse()  # at once, because mistakes on the command line need no checks
        findings["Imports"] = attempt(check_imports)
    if any(finding.status == "error" for finding in findings.values()):
        report(findings, None, {}, "--json" in sys.argv)
        sys.exit("error: the other checks need these packages")
    from recipe.benchmark.preflight import Preflight
    from recipe.command_line import load_config

    config = load_config(["--config", args.config, *options])[0]
    preflight = Preflight(config, has_data, args.config_file, findings)
    preflight.run(args.measure)
    launcher = ["accelerate", "launch"] + (["--config_file", args.config_file] if args.config_file else [])
    command = [*launcher, "recipe/train.py", "--config", args.config, *options]
    if preflight.can_run():
        report(findings, command, describe(preflight), args.json)
    else:
        report(findings, None, {}, args.json)
        num_errors = sum(finding.status == "error" for finding in findings.values())
        sys.exit(f"error: this run cannot start: {num_errors} error{'s' * (num_errors > 1)}")


def parse() -> tuple[argparse.Namespace, list[str], bool]:
    """Return the options of this script, those of recipe/train.py, and whether these name data.

    If they do not, they end with a place for it.
    """
    from recipe.arguments import CommandLine
    from recipe.command_line import names_data

    parser = CommandLine(description="Check this machine; further options are those of recipe/train.py.")
    parser.add_argument("--config", default="demo", help="recipe to check (default: demo)")
    parser.add_argument("--config_file", help="Accelerate config (default: what `accelerate config` wrote)")
    parser.add_argument("--measure", action="store_true", help="train a few steps to measure speed and memory")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args, options = parser.parse_with_run_options()
    has_data = names_data(args.config, options)
    return args, options + ([] if has_data else ["--dataset_dir", "DIR"]), has_data


def describe(preflight: "Preflight") -> dict[str, Any]:
    """Return what the run takes: label -> value. Empty if nothing is known."""
    expected, config = preflight.expected, preflight.config
    if expected is None:
        return {}
    planned = preflight.num_steps()
    steps, seconds = (planned and expected.length(config, planned)) or (planned, None)
    accumulation = config.global_batch_size // (expected.plan.micro_batch_size * preflight.launch.num_processes)
    return {
        "source": expected.source,
        "micro_batch_size": expected.plan.micro_batch_size,
        "activation_checkpointing": expected.plan.activation_checkpointing,
        "loss_chunks": expected.plan.loss_chunks,
        "optim": expected.plan.optim,
        "gradient_accumulation_steps": accumulation,
        "memory_gb": round(expected.memory_bytes / 1e9, 2),
        "usable_memory_gb": round(expected.usable_bytes / 1e9, 2),
        "tokens_per_second": expected.tokens_per_second and round(expected.tokens_per_second),
        "seconds_to_first_step": expected.seconds_to_first_step,
        "steps": steps,
        "max_minutes": config.max_minutes if steps != planned else None,
        "seconds": None if seconds is None else round(seconds, 1),
    }


def report(findings: dict[str, Finding], command: list[str] | None, run: dict[str, Any], as_json: bool) -> None:
    """Print the checks and what the run takes, as text of 80 columns or as JSON."""
    if as_json:
        checks = [{"name": name, **finding._asdict()} for name, finding in findings.items()]
        can_run = all(finding.status != "error" for finding in findings.values())
        print(
            json.dumps(
                {"can_run": can_run, "checks": checks, "command": command and shlex.join(command), "run": run},
                indent=2,
            )
        )
        return
    for name, finding in findings.items():
        print(wrap(f"{finding.status:9}{name:12}{finding.found}", INDENT))
        if finding.remedy:
            print(wrap(" " * INDENT + finding.remedy, INDENT))
    if command is not None:
        words = " ".join(shlex.quote(word).replace(" ", "\0") for word in command)  # lines break between arguments
        lines = textwrap.wrap(words, WIDTH - 2, subsequent_indent="    ", **WHOLE_WORDS)
        print("\n" + " \\\n".join(lines).replace("\0", " "))
    if run:
        print("\n" + "\n".join(f"{label:17}{value}" for label, value in summary(run)))


def summary(run: dict[str, Any]) -> list[tuple[str, str]]:
    """Format the values of `describe`."""
    source = run["source"]
    rate = (
        f"{run['tokens_per_second']:,} tokens/s ({source})" if run["tokens_per_second"] else "unknown; use --measure"
    )
    options = [run["optim"]] + ["activation checkpointing"] * run["activation_checkpointing"]
    options += [f"loss in {run['loss_chunks']} chunks"] * (run["loss_chunks"] > 1)
    lines = [
        ("micro-batch", f"{run['micro_batch_size']} rows x {run['gradient_accumulation_steps']} per step"),
        ("options", ", ".join(options)),
        ("memory", f"{run['memory_gb']:.1f} of {run['usable_memory_gb']:.1f} GB ({source})"),
        ("throughput", rate),
    ]
    if run["seconds_to_first_step"]:
        lines.append(("first step", f"after {run['seconds_to_first_step']:.0f} s ({source})"))
    if run["seconds"] is not None:
        units = ("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1)
        unit, size = next((unit, size) for unit, size in units if run["seconds"] >= 2 * size or size == 1)
        limit = f", limited by max_minutes {run['max_minutes']:g}" if run["max_minutes"] else ""
        lines.append(("time", f"{run['seconds'] / size:,.1f} {unit} for {run['steps']:,} steps ({source}{limit})"))
    return lines


def wrap(text: str, indent: int) -> str:
    """Wrap one line at 80 columns."""
    return textwrap.fill(text, WIDTH, subsequent_indent=" " * indent, **WHOLE_WORDS)


if __name__ == "__main__":
    run_main(main)
