"""Measure what kills cost: training time kept, steps lost, seconds to resume, stalls of saves, differing bits.

python scripts/benchmarks/faults.py --nanogpt DIR --run_clm FILE --output_file scripts/benchmarks/faults_cpu.json

Each program trains the same GPT-2 on the same text on the CPU, saves about every 10 s, and meets the same SIGKILLs,
after which it is started again at once. A table in Markdown appears beside the JSON. Results are saved as they come.
The three programs together take about half an hour, in which nothing else should use the CPU.
"""

import argparse
import json
import math
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from recipe.arguments import CommandLine
from recipe.benchmark.faults import (
    UNSETTLED_STEPS,
    Life,
    compare_losses,
    describe_kills,
    differing_bits,
    draw_kills,
    kept_share,
    save_stalls,
    undisturbed_step_seconds,
)
from recipe.benchmark.interrupted import InterruptedRun, Program, build_programs
from recipe.benchmark.measure import Setting, end_programs, finish_results, replace_file
from recipe.checkpoint.manifest import why_damaged
from recipe.command_line import load_config
from recipe.data.prepare import open_dataset_for
from recipe.errors import UserError, run_main

MODEL = {"n_layer": 4, "n_head": 4, "n_embd": 256}  # 3.7 M parameters with the demo's vocabulary
ROWS = 8  # per step; one forward pass
CALIBRATION_STEPS = 40
TERM_SECONDS = 3.0  # SIGTERM arrives up to this long after the first step
GRACE_SECONDS = 60.0  # until a program that ignores SIGTERM is killed


def main() -> None:
    parser = CommandLine(description="Measure what kills cost a run.")
    parser.add_argument("--nanogpt", type=Path, help="folder of nanoGPT, to measure it as well")
    parser.add_argument("--run_clm", type=Path, help="Transformers' run_clm.py, to measure it as well")
    parser.add_argument("--rates", type=float, nargs="+", default=[30, 60, 300], help="seconds per kill (30 60 300)")
    parser.add_argument("--minutes", type=float, default=1, help="least time at each rate (default: 1)")
    parser.add_argument("--undisturbed_seconds", type=float, default=45, help="time without kills (default: 45)")
    parser.add_argument("--save_seconds", type=float, default=10, help="seconds between checkpoints (default: 10)")
    parser.add_argument("--signals", type=int, default=3, help="SIGTERMs at random moments (default: 3)")
    parser.add_argument("--threads", type=int, help="CPUs to use (default: all that this process may use)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random moments (default: 0)")
    parser.add_argument("--output_file", type=Path, help="JSON to write")
    args = parser.parse_args()
    if min(*args.rates, args.minutes, args.undisturbed_seconds, args.save_seconds) <= 0:
        raise UserError("--rates, --minutes, --undisturbed_seconds and --save_seconds must be above 0")
    if args.output_file and not args.output_file.absolute().parent.is_dir():
        raise UserError(f"the folder of --output_file {args.output_file} does not exist")
    cpus = sorted(os.sched_getaffinity(0))
    threads = len(cpus) if args.threads is None else args.threads
    if not 1 <= threads <= len(cpus):
        raise UserError(f"--threads must be between 1 and {len(cpus)}, the CPUs that this process may use")
    os.sched_setaffinity(0, cpus[:threads])  # the programs inherit it

    dataset = open_dataset_for(load_config([])[0])
    model = ",".join(f"{key}={value}" for key, value in MODEL.items())
    options = {
        "dataset_dir": dataset.directory.absolute(),
        "block_size": dataset.block_size,
        "config_overrides": model,
        "optim": "adamw_torch_fused",  # as the other programs
        "learning_rate": 4e-3,
    }
    setting = Setting("", options, MODEL, dataset.vocab_size, dataset.block_size, 0, ROWS, ROWS)
    results: dict[str, Any] = {
        "setting": f"GPT-2 with {model}, no dropout, {ROWS} rows of {dataset.block_size} tokens per step",
        "threads": threads,
        "kills_at_seconds": {f"{rate:g}": kill_times(rate, args.minutes, args.seed) for rate in args.rates},
        "programs": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        try:
            for program in build_programs(setting, dataset, work, args.nanogpt, args.run_clm):
                found = results["programs"][program.name] = {"what": program.what, "settings": program.settings}
                for phase in measure(program, work, results, args):
                    found |= phase
                    print(f"{program.what}: {json.dumps(phase)}"[:300], file=sys.stderr, flush=True)
                    save_results(results, args.output_file)
        finally:
            end_programs()
    print(markdown(results))


def kill_times(rate: float, minutes: float, seed: int) -> list[float]:
    """Return the moments of the kills at one rate, for as many intervals as `minutes` take."""
    return [round(at, 2) for at in draw_kills(rate, math.ceil(minutes * 60 / rate), seed)]


def save_results(results: dict[str, Any], output_file: Path | None) -> None:
    """Write the results so far, and the table beside them."""
    if output_file is not None:
        replace_file(output_file, lambda path: finish_results(results, path))
        replace_file(output_file.with_suffix(".md"), lambda path: path.write_text(markdown(results) + "\n"))


def measure(program: Program, work: Path, results: dict[str, Any], args: argparse.Namespace) -> Iterator[dict]:
    """Yield the results of one program, phase by phase."""
    threads = results["threads"]
    first = InterruptedRun(program, work / f"{program.name}-calibration", 10**6, threads)
    first.start()  # also fills the compiler's cache
    first.follow(lambda: first.step >= CALIBRATION_STEPS)
    first.kill()
    save_steps = round(args.save_seconds / undisturbed_step_seconds(first.lives, first.save_steps))
    save_steps = max(2 * UNSETTLED_STEPS, save_steps)
    names = (Path(part).name if str(part).startswith("/") else str(part) for part in program.command)
    yield {"command": shlex.join(names), "save_steps": save_steps}

    through = InterruptedRun(program, work / f"{program.name}-through", save_steps, threads)
    through.start()
    through.follow(
        lambda: (
            through.step > save_steps
            and through.step % save_steps >= UNSETTLED_STEPS
            and through.seconds_since_first_step > args.undisturbed_seconds
        )
    )
    through.kill()
    (start, _), (end, _) = through.life.steps[UNSETTLED_STEPS], through.life.steps[-1]
    step_seconds = undisturbed_step_seconds(through.lives, save_steps)
    kept = kept_share(through.lives, start, end, step_seconds)
    stalls = save_stalls(through.lives, save_steps, step_seconds)
    yield {"step_ms": round(step_seconds * 1e3, 2), "kept_without_kills": round(kept, 4)}

    run = InterruptedRun(program, work / f"{program.name}-killed", save_steps, threads)
    run.keep_step = through.step - through.step % save_steps
    run.start()
    run.follow(lambda: run.step >= save_steps + UNSETTLED_STEPS)  # every kill finds a checkpoint
    kept = {}
    for rate, kills in results["kills_at_seconds"].items():
        start = time.monotonic()
        for kill in kills:
            run.follow(partial(is_past, start + kill))
            run.kill()
            run.start()
        end = start + float(rate) * len(kills)
        run.follow(partial(is_past, end))
        run.follow(lambda: run.step > 0)  # its first step says where it resumed
        during = between(run.lives, start, end)
        step_seconds = undisturbed_step_seconds(during, save_steps) or step_seconds
        kept[rate] = {"share": round(kept_share(run.lives, start, end, step_seconds), 4), "kills": len(kills)}
        stalls += save_stalls(during, save_steps, step_seconds)
        kept[rate]["step_ms"] = round(step_seconds * 1e3, 2)
        yield {"kept": kept, "kills": list(describe_kills(run.lives))}
    run.follow(lambda: run.kept is not None and run.step > max(s for life in run.lives[:-1] for _, s in life.steps))
    run.kill()
    newest = program.checkpoints(through.output)[-1]
    differing, total = differing_bits(program.load(newest), program.load(run.kept))
    verified_at = time.monotonic()
    if program.verifies and (reason := why_damaged(run.kept)):
        raise UserError(f"a checkpoint is damaged: {reason}")
    verify_seconds = time.monotonic() - verified_at
    steps_differing, steps_compared = compare_losses(run.lives, through.life)
    yield {
        "kills": list(describe_kills(run.lives))[:-1],  # the last one ended the measurement
        "save_stall_seconds": [round(stall, 3) for stall in stalls],
        **({"verify_seconds": round(verify_seconds, 3)} if program.verifies else {}),
        "same_step": run.keep_step,
        "kills_before_same_step": sum((k["killed_at_step"] or 0) < run.keep_step for k in describe_kills(run.lives)),
        "differing_bits": differing,
        "bits": total,
        "steps_with_another_loss": steps_differing,
        "steps_compared": steps_compared,
        "examples": program.examples(run.lives, run.output, ROWS, steps_differing),
    }

    rng, terms = random.Random(args.seed), []
    for _ in range(args.signals):
        run.start()
        run.follow(lambda: run.step > 0)
        run.follow(partial(is_past, time.monotonic() + rng.uniform(0, TERM_SECONDS)))
        terms.append(terminate(run))
        yield {"sigterm": terms}


def is_past(moment: float) -> bool:
    return time.monotonic() >= moment


def between(lives: list[Life], start: float, end: float) -> list[Life]:
    """Return the lives with only the steps that were logged within a time."""
    return [replace(life, steps=[step for step in life.steps if start <= step[0] <= end]) for life in lives]


def terminate(run: InterruptedRun) -> dict[str, Any]:
    """Send SIGTERM. Return the seconds until the process ended, and whether its last step was saved."""
    sent_at = time.monotonic()
    run.process.terminate()
    with suppress(subprocess.TimeoutExpired):
        run.process.wait(GRACE_SECONDS)
    seconds = time.monotonic() - sent_at
    run.kill()
    found = run.program.checkpoints(run.output)
    saved = bool(found) and run.program.step_of(found[-1]) == run.step
    return {"seconds": round(seconds, 2), "exit_status": run.process.returncode, "step": run.step, "saved": saved}


def markdown(results: dict[str, Any]) -> str:
    """Return the results as a table with one column per program; cells that are not measured yet are empty."""
    cells: dict[str, Callable[[dict[str, Any]], str]] = {
        "undisturbed step": lambda p: f"{p['step_ms']:.0f} ms",
        "steps between checkpoints": lambda p: f"{p['save_steps']}",
        "training time kept without kills": lambda p: f"{p['kept_without_kills']:.1%}",
        **{f"... at a kill every {rate} s": partial(kept_at, rate) for rate in results["kills_at_seconds"]},
        "steps lost per kill": lambda p: spread([k["steps_lost"] for k in p["kills"] if "steps_lost" in k], 0),
        "s from a kill to the first output": lambda p: spread(seconds_to(p, "first_output"), 1),
        "... until loaded": lambda p: spread(seconds_to(p, "loaded"), 1),
        "... to the first step": lambda p: spread(seconds_to(p, "first_step"), 1),
        "... to the first new step": lambda p: spread(seconds_to(p, "new_step"), 1),
        "s verifying a checkpoint": lambda p: f"{p['verify_seconds']:.2f}",
        "failed starts": lambda p: f"{sum(len(kill['failed_starts']) for kill in p['kills'])}",
        "s by which a save delays training": lambda p: spread(p["save_stall_seconds"], 2),
        "s from SIGTERM to the end": lambda p: spread([term["seconds"] for term in p["sigterm"]], 1),
        "last step saved after SIGTERM": lambda p: f"{sum(t['saved'] for t in p['sigterm'])} of {len(p['sigterm'])}",
        "examples repeated, skipped": lambda p: p["examples"],
        "steps with another loss": lambda p: f"{p['steps_with_another_loss']} of {p['steps_compared']}",
        "kills before the bits were compared": lambda p: f"{p['kills_before_same_step']}",
        "differing bits": lambda p: f"{p['differing_bits']:,} of {p['bits']:,}",
    }
    programs = results["programs"].values()
    rows = [["mean (maximum)", *(program["what"] for program in programs)], ["---", *("---:" for _ in programs)]]
    for label, text in cells.items():
        row = [label]
        for program in programs:
            try:
                row.append(text(program))
            except KeyError:  # not measured yet
                row.append("")
        rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def kept_at(rate: str, program: dict[str, Any]) -> str:
    return f"{program['kept'][rate]['share']:.1%}"


def seconds_to(program: dict[str, Any], phase: str) -> list[float]:
    """Return the seconds from each kill to a phase of the next start, if it was reached."""
    return [kill["seconds_to"][phase] for kill in program["kills"] if phase in kill.get("seconds_to", {})]


def spread(values: list[float], digits: int) -> str:
    return f"{fmean(values):,.{digits}f} ({max(values):,.{digits}f})" if values else "none"


if __name__ == "__main__":
    run_main(main)
