"""Turn the dictionary that scripts/run_ladder.py writes as JSON into tables for the screen and in Markdown."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

SECTIONS = {
    "ladder": "Each rung adds one switch to all rungs before it",
    "extras": "Beyond the defaults: each is added to those kept so far, and kept if faster",
    "memory": "Options that save memory, on top of the recipe's defaults",
    "peers": "The same training in other programs (ratio: our tokens/s divided by theirs)",
    "ablation": "The recipe's defaults with one switch off at a time",
}
LOSS_DIFFERS = 0.05  # nats: more than bf16 rounding changes the loss
NOISY = 0.1  # spread of the laps of one run, relative to their median


@dataclass(frozen=True)
class Column:
    """width: characters on the screen; 0 shows the column in Markdown only. text: the cell of an entry."""

    header: str
    width: int
    text: Callable[[dict[str, Any]], str]


def _step_ms(entry: dict[str, Any]) -> str:
    is_noisy = entry["step_ms_highest"] - entry["step_ms_lowest"] > NOISY * entry["step_ms"]
    return f"{entry['step_ms']:,.1f}{'~' if is_noisy else ' '}"


def _loss(entry: dict[str, Any]) -> str:
    if not entry.get("loss_is_finite", True):
        return "inf/nan*"
    delta = entry.get("loss_delta")
    return "" if delta is None else f"{delta:+.4f}{'*' if abs(delta) > LOSS_DIFFERS else ' '}"


RUN_COLUMNS = [
    Column("", 28, lambda e: e["what"] + " (kept)" * e.get("kept", False)),
    Column("step ms", 10, _step_ms),
    Column("fastest-slowest lap", 0, lambda e: f"{e['step_ms_lowest']:,.1f}-{e['step_ms_highest']:,.1f}"),
    Column("speedup", 8, lambda e: f"{e['speedup']:.2f}" if e.get("speedup") else ""),
    Column("tokens/s", 10, lambda e: f"{e['tokens_per_second']:,.0f}"),
    Column("MFU", 6, lambda e: f"{e['mfu']:.1%}"),
    Column("MFU by data sheet", 0, lambda e: f"{e['mfu_data_sheet']:.1%}" if "mfu_data_sheet" in e else ""),
    Column("peak GB", 8, lambda e: f"{e['peak_memory_bytes'] / 1e9:.2f}"),
    Column("attention", 0, lambda e: e["attention_kernel"]),
    Column("loss diff", 10, _loss),
    Column("seconds to first step", 0, lambda e: f"{e['seconds_to_first_step']:.1f}"),
    Column("largest micro-batch", 0, lambda e: str(e.get("largest_micro_batch", ""))),
]
PEER_COLUMNS = [
    Column("", 41, lambda e: e["what"]),
    Column("tokens/s", 10, lambda e: f"{e['tokens_per_second']:,.0f}"),
    Column("ours", 10, lambda e: f"{e['our_tokens_per_second']:,.0f}"),
    Column("ratio", 7, lambda e: f"{e['times']:.3f}"),
    Column("spread", 12, lambda e: f"{min(e['times_of_each_round']):.2f}-{max(e['times_of_each_round']):.2f}"),
    Column("in each round", 0, lambda e: ", ".join(f"{value:.2f}" for value in e["times_of_each_round"])),
]


def columns_of(section: str) -> list[Column]:
    return PEER_COLUMNS if section == "peers" else RUN_COLUMNS


def with_speedups(results: dict[str, Any], section: str) -> list[dict[str, Any]]:
    """Add to a section's entries their speedup over the ladder's first run, or over the runs with everything on."""
    if section == "ablation":
        base = [e["step_ms"] for e in results[section] if e["name"] in ("everything", "again") and "step_ms" in e]
    else:
        base = [e["step_ms"] for e in results.get("ladder", []) if "step_ms" in e][:1]
    entries = results.get(section, [])
    return [{**e, "speedup": fmean(base) / e["step_ms"]} if base and "step_ms" in e else e for e in entries]


def screen_header(section: str) -> str:
    first, *rest = columns_of(section)
    return f"\n{SECTIONS[section]}:\n" + " " * first.width + "".join(f"{c.header:>{c.width}}" for c in rest if c.width)


def screen_row(entry: dict[str, Any], section: str) -> str:
    """Format one entry in at most 80 columns."""
    first, *rest = columns_of(section)
    cells = "".join(
        f"{column.text(entry):>{column.width}}" for column in rest if column.width and "not_run" not in entry
    )
    cells = cells or f"not run: {entry['not_run']}"
    return f"{first.text(entry)[: first.width - 1]:{first.width}}{cells}"[:80].rstrip()


def markdown_table(entries: list[dict[str, Any]], columns: list[Column]) -> str:
    """Format the entries, with the columns that are not empty."""
    rows = [
        [entry["what"], f"not run: {entry['not_run']}"] + [""] * (len(columns) - 2)
        if "not_run" in entry
        else [column.text(entry).strip() for column in columns]
        for entry in entries
    ]
    shown = [i for i in range(len(columns)) if i < 2 or any(row[i] for row in rows)]
    lines = [[column.header for column in columns], ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line[i] for i in shown)} |" for line in lines)


LEGEND = [
    f"step ms: median over laps of a few steps. ~: these laps differ by more than {NOISY:.0%}; the machine was busy.",
    "speedup: relative to the first line of the ladder; in the ablation, relative to everything on.",
    "MFU: FLOPs of the model as a share of the fastest matrix product measured on this machine.",
    "loss diff: training loss minus that of fp32 with tied weights, over the same steps. *: the difference exceeds "
    f"{LOSS_DIFFERS} or the loss is not finite; this run trains differently.",
]


def notes(results: dict[str, Any]) -> list[str]:
    """Say what was measured, on which machine, what follows from it, and what the columns mean."""
    machine, environment = results["machine"], results["environment"]
    timed = [e for section in SECTIONS for e in results.get(section, []) if "step_ms" in e]
    rates = ", ".join(f"{name} {rate:,.2f}" for name, rate in machine["matmul_tflops"].items())
    data_sheet = f" (data sheet: {machine['data_sheet_tflops']:,.0f})" if machine["data_sheet_tflops"] else ""
    lines = [
        f"Model: {results['setting']}.",
        f"Machine: {machine['name']}, {environment['num_cpus']} CPUs; torch {environment['torch']}, transformers "
        f"{environment['transformers']}. Matrix products reach {rates} TFLOP/s{data_sheet}.",
    ]
    if timed:
        lines += [
            "The first step is timed from the start of the program; each run reuses code that earlier runs compiled.",
            f"Losses are compared after about {results['goal']['steps']} steps; differences that appear later are not "
            "visible here.",
        ]
    if timed and machine["device"] == "cpu":
        lines.append("peak GB: the largest resident memory of the process, including compilation.")
    twice = {e["name"]: e["step_ms"] for e in results.get("ablation", []) if "step_ms" in e}
    if {"everything", "again"} <= set(twice):
        noise = abs(twice["everything"] / twice["again"] - 1)
        lines.append(f"Two identical runs with everything on differ by {noise:.0%}; ignore smaller differences.")
    if any("step_ms" in e for e in results.get("extras", [])):
        kept = [e["what"] for e in results["extras"] if e.get("kept")]
        lines.append(f"Extras that pay on this machine: {', '.join(kept) or 'none'}.")
    return lines + (LEGEND if timed else [])


def to_markdown(results: dict[str, Any]) -> str:
    """Format everything that was measured, a table per section, and the notes."""
    blocks = []
    for section, title in SECTIONS.items():
        if results.get(section):
            blocks += [f"{title}:", markdown_table(with_speedups(results, section), columns_of(section))]
            if section == "peers":
                commands = [f"    {entry['command']}" for entry in results[section]]
                blocks += ["Commands, without paths:", "\n".join(commands)]
    return "\n\n".join([*blocks, *notes(results)])
