"""The ladder's results as a table for the screen, as Markdown and as a bar chart.

In: the dictionary that scripts/run_ladder.py writes as JSON. Out: text, or a PNG.
"""

from pathlib import Path
from typing import Any

SECTIONS = {
    "ladder": "each rung has its switch and those of all rungs below it",
    "extras": "then, one by one, kept where it pays on this machine",
    "memory": "memory options, on the recipe's defaults",
    "peers": "other programs, the same training: how many times as fast ours is",
    "ablation": "the recipe's defaults, with one switch off",
}
CHANGES_WHAT_IS_LEARNED = 0.05  # nats: more than bf16 rounding makes of the loss
NOISY = 0.1  # laps of one run further apart than this share of their median
TEXT_HEADER = f"{'':33}{'step ms':>9}{'times':>6}{'tokens/s':>10}{'MFU':>5}{'GB':>7}{'loss':>8}"  # of `text_row`
PEER_HEADER = f"{'':44}{'tokens/s':>10}{'times':>8} (of the rounds)"  # of `peer_row`


def speedups(results: dict[str, Any], section: str) -> dict[str, float]:
    """How many times as fast as the ladder's first entry; in the ablation, as everything on, the mean of two runs."""
    entries = [e for e in results["ablation" if section == "ablation" else "ladder"] if "step_ms" in e]
    if section == "ablation":  # what was measured twice
        entries = [e for e in entries if e["name"] in ("everything", "again")]
        base = sum(e["step_ms"] for e in entries) / max(len(entries), 1)
    else:
        base = entries[0]["step_ms"] if entries else 0
    return {e["name"]: base / e["step_ms"] for e in results[section] if base and "step_ms" in e}


def text_row(entry: dict[str, Any], speedup: float | None) -> str:
    """One entry in at most 80 columns."""
    what = f"  {entry['what']}"[:33]
    if "step_ms" not in entry:
        return f"{what:33} {'not run: ' + entry['not_run']}"[:80]
    delta = entry.get("loss_delta")
    return (
        f"{what:33}{entry['step_ms']:>9,.1f}{_times(speedup):>6}{entry['tokens_per_second']:>10,.0f}"
        f"{entry['mfu']:>5.0%}{entry['peak_memory_bytes'] / 1e9:>7.2f}{'' if delta is None else f'{delta:+.4f}':>8}"
        f"{_mark(entry) + '~' * _is_noisy(entry):>2}".rstrip()
    )


def peer_row(entry: dict[str, Any]) -> str:
    """One peer in at most 80 columns."""
    if "times" not in entry:
        return f"  {entry['what']:42.42} not run: {entry['not_run']}"[:80]
    lowest, highest = min(entry["times_of_each_round"]), max(entry["times_of_each_round"])
    rates = f"{entry['tokens_per_second']:>10,.0f}{entry['times']:>8.3f}"
    spread = f" ({lowest:.3f}-{highest:.3f})" if len(entry["times_of_each_round"]) > 1 else ""
    return f"  {entry['what']:42.42}{rates}{spread}"


def _times(speedup: float | None) -> str:
    return "" if speedup is None else f"{speedup:.2f}"  # there may be nothing to compare with


def _mark(entry: dict[str, Any]) -> str:
    delta = entry.get("loss_delta")
    differs = delta is not None and abs(delta) > CHANGES_WHAT_IS_LEARNED
    return "*" if differs or not entry.get("loss_is_finite", True) else ""


def _is_noisy(entry: dict[str, Any]) -> bool:
    return entry["step_ms_highest"] - entry["step_ms_lowest"] > NOISY * entry["step_ms"]


def notes(results: dict[str, Any]) -> list[str]:
    """What the numbers mean, and what they were measured on."""
    machine = results["machine"]
    timed = [e for section in SECTIONS for e in results.get(section, []) if "step_ms" in e]
    rates = ", ".join(f"{name} {rate:,.2f}" for name, rate in machine["matmul_tflops"].items())
    lines = [
        f"Model: {results['setting']}.",
        f"Machine: {machine['name']}, {results['environment']['num_cpus']} CPUs; torch "
        f"{results['environment']['torch']}, transformers {results['environment']['transformers']}; matrix products "
        f"of {rates} TFLOP/s measured"
        + (f", {machine['data_sheet_tflops']:,.0f} by the data sheet" if machine["data_sheet_tflops"] else "")
        + (". MFU is against the highest measured." if timed else "."),
    ]
    if timed:
        lines.append(
            "The first step is counted from the start of the program; what an earlier run shown here has compiled is "
            "not compiled again."
        )
        lines.append(
            f"Losses are compared after about {results['goal']['steps']} steps: what shows later does not show."
        )
    if any(_mark(e) for e in timed):
        lines.append(f"* learns something else: its loss is more than {CHANGES_WHAT_IS_LEARNED} from that of fp32.")
    if any(_is_noisy(e) for e in timed):
        lines.append(f"~ laps more than {NOISY:.0%} apart: something else ran on the machine, or it was throttled.")
    if any(e["mfu"] > 1 for e in timed):
        lines.append("MFU above 100%: the matrix products were measured while something else ran.")
    if timed and results["machine"]["device"] == "cpu":
        lines.append("GB: the most that the whole process had resident, with what compiling took.")
    twice = {e["name"]: e["step_ms"] for e in results.get("ablation", []) if "step_ms" in e}
    if {"everything", "again"} <= set(twice):
        noise = abs(twice["everything"] / twice["again"] - 1)
        lines.append(f"Everything on was measured twice, {noise:.0%} apart: smaller differences mean nothing.")
    kept = [e["what"] for e in results.get("extras", []) if e.get("kept")]
    if any("step_ms" in e for e in results.get("extras", [])):
        lines.append(f"Of the extras these pay here: {', '.join(kept) or 'none'}.")
    return lines


def to_markdown(results: dict[str, Any], sections: tuple[str, ...] = tuple(SECTIONS)) -> str:
    """One table a section, with everything that was measured."""
    blocks = []
    for section in sections:
        entries = results.get(section, [])
        if not entries:
            continue
        if section == "peers":
            blocks.append(_peers_markdown(entries))
            continue
        rows = [_markdown_cells(entry, speedups(results, section).get(entry["name"])) for entry in entries]
        columns = list(
            dict.fromkeys(column for row in rows for column in row)
        )  # the largest batch was not always asked
        lines = [f"| {' | '.join([SECTIONS[section], *columns[1:]])} |", "|---" * len(columns) + "|"]
        lines += [f"| {' | '.join(row.get(column, '') for column in columns)} |" for row in rows]
        blocks.append("\n".join(lines))
    return "\n\n".join([*blocks, *notes(results)])


def to_short_markdown(results: dict[str, Any], section: str) -> str:
    """What a README has room for: a table of the entries that ran."""
    peers = section == "peers"
    columns = ("its tokens/s", "ours is as fast") if peers else ("tokens/s", "times", "peak GB", "loss against fp32's")
    lines = [f"| {' | '.join(('', *columns))} |", "|---" * (len(columns) + 1) + "|"]
    times = {} if peers else speedups(results, section)
    for entry in results[section]:
        if "not_run" in entry:
            continue
        cells = [entry["what"] + (" (kept)" if entry.get("kept") else ""), f"{entry['tokens_per_second']:,.0f}"]
        cells += (
            [f"{entry['times']:.2f} times"]
            if peers
            else [f"{times[entry['name']]:.2f}", f"{entry['peak_memory_bytes'] / 1e9:.2f}", _loss(entry)]
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _loss(entry: dict[str, Any]) -> str:
    if not entry.get("loss_is_finite", True):
        return "not finite *"
    return "" if entry.get("loss_delta") is None else f"{entry['loss_delta']:+.4f} {_mark(entry)}".rstrip()


def _peers_markdown(entries: list[dict[str, Any]]) -> str:
    lines = [f"| {SECTIONS['peers']} | its tokens/s | ours | times (of each round) |", "|---|---|---|---|"]
    for entry in entries:
        if "times" not in entry:
            lines.append(f"| {entry['what']} | not run: {entry['not_run']} | | |")
            continue
        rounds = ", ".join(f"{value:.2f}" for value in entry["times_of_each_round"])
        rates = f"{entry['tokens_per_second']:,.0f} | {entry['our_tokens_per_second']:,.0f}"
        lines.append(f"| {entry['what']} | {rates} | {entry['times']:.3f} ({rounds}) |")
    commands = [f"    {entry['command']}" for entry in entries]
    return "\n".join([*lines, "", "Each with its command, without the paths:", "", *commands])


def _markdown_cells(entry: dict[str, Any], speedup: float | None) -> dict[str, str]:
    """Cells by their column."""
    what = entry["what"] + (" (kept)" if entry.get("kept") else "")
    if "step_ms" not in entry:
        return {"what": what, "step ms (spread)": f"not run: {entry['not_run']}"}
    spread = f"{entry['step_ms_lowest']:,.1f}-{entry['step_ms_highest']:,.1f}"
    cells = {
        "what": what,
        "step ms (spread)": f"{entry['step_ms']:,.1f} ({spread})",
        "times": _times(speedup),
        "tokens/s": f"{entry['tokens_per_second']:,.0f}",
        "MFU": f"{entry['mfu']:.1%}",
    }
    if "mfu_data_sheet" in entry:
        cells["of the data sheet"] = f"{entry['mfu_data_sheet']:.1%}"
    cells |= {
        "peak GB": f"{entry['peak_memory_bytes'] / 1e9:.2f}",
        "attention": entry["attention_kernel"],
        "loss against fp32's": _loss(entry),
        "first step, s": f"{entry['seconds_to_first_step']:.1f}",
    }
    if "largest_micro_batch" in entry:
        cells["largest micro-batch"] = str(entry["largest_micro_batch"])
    return cells


def save_chart(results: dict[str, Any], path: Path) -> None:
    """Bars of tokens per second, rung by rung. Needs matplotlib."""
    from matplotlib.figure import Figure

    entries = [e for section in ("ladder", "extras") for e in results.get(section, []) if "step_ms" in e]
    figure = Figure(figsize=(9, 0.36 * len(entries) + 1.2), layout="constrained")
    axes = figure.subplots()
    rates = [entry["tokens_per_second"] for entry in entries]
    colors = ["#4878a8" if entry in results["ladder"] or entry.get("kept") else "#c4c4c4" for entry in entries]
    axes.barh(range(len(entries)), rates, color=colors)
    axes.set_yticks(range(len(entries)), [entry["what"] for entry in entries])
    axes.invert_yaxis()
    axes.set_xlim(0, max(rates, default=1) * 1.18)
    for i, (entry, rate) in enumerate(zip(entries, rates, strict=True)):
        axes.text(rate, i, f" {rate:,.0f}  ({entries[0]['step_ms'] / entry['step_ms']:.2f}x)", va="center", fontsize=9)
    axes.set_xlabel("tokens per second")
    axes.set_title(f"{results['machine']['name']}: {results['setting'].rpartition(': ')[2]}", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    figure.savefig(path, dpi=130, format="png")
