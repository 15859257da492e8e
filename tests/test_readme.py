"""README.md: its numbers are those of the result files, and its links, paths and options exist.

A comment `<!-- table: FILE.json SECTION -->` before a table says where its numbers come from. SECTION is a key of the
file, or several joined by dots; without it, the whole file counts.
"""

import json
import re
import shlex
from collections.abc import Iterator

import pytest
from conftest import ROOT, run_script

from recipe.benchmark.measure import LAP
from recipe.command_line import CONFIGS_DIR
from recipe.rules import PROFILED_STEPS
from recipe.run.summary import describe_evaluation

TEXT = (ROOT / "README.md").read_text()
TABLE = re.compile(r"<!-- table: (\S+) ?(\S*) -->\n+((?:\|.*\|\n)+)")
NUMBER = re.compile(r"(?<![\w.])[+-]?\d[\d,]*(?:\.\d+)?")
MAX_LINES = 630
# The quantity in each column of a table, from an entry of a result file and the first entry of its section.
QUANTITIES = {
    "tokens/s": lambda entry, first: entry["tokens_per_second"],
    "speedup": lambda entry, first: first["step_ms"] / entry["step_ms"],
    "our speedup": lambda entry, first: entry["times"],
    "step ms": lambda entry, first: entry["step_ms"],
    "MFU": lambda entry, first: entry["mfu"] * 100,
    "peak GB": lambda entry, first: entry["peak_memory_bytes"] / 1e9,
    "loss minus fp32 loss": lambda entry, first: entry["loss_delta"],
}
SCALES = (1, 100, 1e-9, 1e-6, 1e-3, 1 / 60)  # other columns: as measured, %, GB, MB, thousands or seconds, minutes
# Programs that other projects provide, and the options of them that the README mentions.
LAUNCHER_OPTIONS = {"config_file", "num_processes", "machine_rank", "main_process_ip"}  # accelerate launch
LAUNCHER_OPTIONS |= {"flavor", "timeout", "secrets", "with", "dry_run"}  # hf jobs uv run
OTHER_OPTIONS = {"nodes"}  # of a cluster's scheduler
OTHER_OPTIONS |= {"no_deps", "wheel_dir", "outfile", "task"}  # of pip and of converters
OTHER_OPTIONS |= {"repo_type", "include", "local_dir", "retry", "create_dirs", "output_dir"}  # of hf and curl


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def section_of(path: str, section: str) -> object:
    found = json.loads((ROOT / path).read_text())
    for key in filter(None, section.split(".")):
        found = found[key]
    return found


def entries_of(path: str, section: str) -> dict[str, dict]:
    """Return the entries of a section that ran, by their labels."""
    found = section_of(path, section)
    if isinstance(found, dict):
        return {key: value if isinstance(value, dict) else {"value": value} for key, value in found.items()}
    return {entry["what"]: entry for entry in found if "not_run" not in entry}


def by_tokens(side: dict, index: int) -> tuple[int, float]:
    """Return the tokens and the final loss of the shortest (0) or longest (-1) runs of a side."""
    return tuple(side["points"][index])


def numbers_in(value: object) -> Iterator[float]:
    """Yield all numbers of an entry, however deep."""
    if isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from numbers_in(item)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value


def is_rounded(shown: str, values: list[float]) -> bool:
    """Return whether a printed number is one of the values, rounded to the digits that it shows."""
    digits = len(shown.partition(".")[2])
    return any(f"{float(shown.replace(',', '')):.{digits}f}" == f"{value:.{digits}f}" for value in values)


@pytest.mark.parametrize(("path", "section", "table"), [m.groups() for m in TABLE.finditer(TEXT)])
def test_tables_show_what_was_measured(path, section, table):
    """Each number equals that of the entry with the row's label, and no entry of a list is missing."""
    header, _, *rows = map(cells_of, table.splitlines())
    entries = entries_of(path, section)
    first, labels = next(iter(entries.values())), []
    for label, *cells in rows:
        labels.append(
            next(name for name in (label.removesuffix(" (kept)"), label.replace(" ", "_")) if name in entries)
        )
        entry = entries[labels[-1]]
        for column, cell in zip(header[1:], cells, strict=True):
            values = [QUANTITIES[column](entry, first)] if column in QUANTITIES else [
                value * scale for value in numbers_in(entry) for scale in SCALES]  # fmt: skip
            shown = NUMBER.findall(cell)
            assert shown or not cell, f"{label}: {column} shows no number: {cell}"
            assert all(is_rounded(number, values) for number in shown), f"{label}: {column} shows {cell}, not {values}"
    assert isinstance(section_of(path, section), dict) or labels == list(entries)


def test_the_check_of_tables_notices_a_wrong_number(tmp_path):
    assert is_rounded("1,234.6", [1234.56]) and is_rounded("-0.0005", [-0.00049]) and is_rounded("+0.0000", [1e-6])
    assert not is_rounded("1,234.5", [1234.56]) and not is_rounded("0.01", [0.0012])
    results = tmp_path / "results.json"
    results.write_text('{"ladder": [{"what": "bf16", "step_ms": 2.5}, {"what": "TF32", "not_run": "no GPU"}]}')
    assert entries_of(results, "ladder") == {"bf16": {"what": "bf16", "step_ms": 2.5}}


def test_the_length_of_the_readme():
    assert len(TEXT.splitlines()) <= MAX_LINES


def test_links_lead_to_existing_files():
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", TEXT) + re.findall(r'(?:src|srcset)="([^"]+)"', TEXT):
        assert (ROOT / target).exists(), target


def test_paths_exist():
    """A path of recipe/, scripts/, tests/ or accelerate_configs/ anywhere in the text."""
    paths = re.findall(r"(?<![\w/.-])(?:recipe|scripts|tests|accelerate_configs)/[\w./-]*\w", TEXT)
    assert paths
    for path in paths:
        assert (ROOT / path).exists(), path


def test_the_table_of_contents_leads_to_sections():
    """Anchors follow GitHub's rule: lower case, no punctuation, hyphens for spaces."""
    text = re.sub(r"^```.*?^```", "", TEXT, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^##+ (.+)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    links = re.findall(r"\]\(#([^)]+)\)", text)
    assert len(links) >= 5 and set(links) <= anchors, set(links) - anchors


def commands_in(text: str) -> Iterator[list[str]]:
    """Yield the commands of the bash blocks, as words."""
    for block in re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            yield shlex.split(line, comments=True)


@pytest.fixture(scope="module")
def known_options():
    """The options of a program: `known_options("scripts/run_ladder.py")`."""
    known = {}

    def find(program: str, capsys) -> set[str]:
        if program not in known:
            run_script(program, "--help")
            known[program] = set(re.findall(r"--([a-z_]+)", capsys.readouterr().out))
        return known[program]

    return find


def test_options_in_commands_exist(known_options, capsys):
    """Every option after a program's name is one of that program, and every option before it is the launcher's."""
    checked = 0
    for words in commands_in(TEXT):
        program = next((i for i, word in enumerate(words) if re.fullmatch(r"(recipe|scripts)/[\w/]+\.py", word)), None)
        if program is None:
            continue
        options = [word[2:].split("=")[0] for word in words[program:] if word.startswith("--")]
        assert set(options) <= known_options(words[program], capsys), words
        launcher = {word[2:].split("=")[0] for word in words[:program] if word.startswith("--")}
        assert launcher <= LAUNCHER_OPTIONS, words
        checked += 1
    assert checked >= 5


def test_options_in_the_text_exist(known_options, capsys):
    """An option that the text mentions belongs to a program of this project or to the launcher."""
    programs = ["recipe/train.py", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "scripts").glob("*.py"))]
    known = set().union(*(known_options(program, capsys) for program in programs if "bare_loop" not in program))
    names = {name.replace("-", "_") for name in re.findall(r"(?<![\w-])--([a-z][a-z_-]+)", TEXT)}
    assert names - known - LAUNCHER_OPTIONS - OTHER_OPTIONS == set()


def test_recipes_in_commands_exist():
    for words in commands_in(TEXT):
        if "recipe/train.py" in words and "--config" in words:
            assert (CONFIGS_DIR / f"{words[words.index('--config') + 1]}.yaml").is_file(), words


def test_python_blocks_are_lines_of_the_loop():
    """What the README shows of the loop is the loop; tests/test_notebook.py runs the cell for notebooks."""
    lines = [line.strip() for line in (ROOT / "recipe" / "train.py").read_text().splitlines()]
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    blocks = [block for block in blocks if "notebook_launcher" not in block]
    assert blocks
    for block in blocks:
        shown = [line.strip() for line in block.splitlines()]
        start = lines.index(shown[0])
        assert lines[start : start + len(shown)] == shown


def test_the_excerpt_of_the_demo_is_the_recorded_run():
    """The evaluations on the first screen are those of demo_cpu.jsonl."""
    recorded = [json.loads(line) for line in (ROOT / "scripts/benchmarks/demo_cpu.jsonl").read_text().splitlines()]
    expected = [
        describe_evaluation(f"step {event['step']:>6,}", event) for event in recorded if event["event"] == "eval"
    ]
    assert [line for line in TEXT.splitlines() if line.startswith("step ")] == expected


def test_numbers_in_the_text_are_measured():
    """Each number, found by the words next to it, is that of a result file, rounded to the digits shown."""
    names = (
        "ladder",
        "ablation",
        "shakespeare",
        "soak",
        "hub_overhead",
        "faults",
        "memory_estimate",
        "watch_overhead",
        "optimizers_demo",
        "optimizers_10m",
        "optimizer_times",
    )
    found = [section_of(f"scripts/benchmarks/{name}_cpu.json", "") for name in names]
    ladder, ablation, shakespeare, soak, overhead, faults, memory, watching, demo, large, times = found
    by_side = {row["side"]: row for row in demo["summary"]["rows"]}
    muon, adamw = demo["summary"]["comparison"]
    large_sides = {row["side"]: row for row in large["summary"]["rows"]}
    ours, nanogpt = (faults["programs"][name] for name in ("ours", "nanogpt"))
    lost = [kill["steps_lost"] for kill in ours["kills"]]
    ran = [entry for key in ("ladder", "extras", "memory") for entry in ladder.get(key, []) if "step_ms" in entry]
    steps = LAP + ladder["goal"]["steps"] + PROFILED_STEPS
    twice = {entry["name"]: entry["step_ms"] for entry in ablation["ablation"] if "step_ms" in entry}
    expected = {
        r"(\d+) minutes on two CPU cores": sum(
            entry["seconds_to_first_step"] + steps * entry["step_ms"] / 1e3 for entry in ran
        )
        / 60,
        r"two identical runs differ by (\d+)%": 100 * abs(twice["everything"] / twice["again"] - 1),
        r"from ([\d.]+) to [\d.]+ nats": shakespeare["untrained"]["loss"],
        r"from [\d.]+ to ([\d.]+) nats": shakespeare["eval_loss"],
        r"SIGKILL (\d+) times": soak["kills"],
        r"keeps (\d+)%, \d+% and \d+% of its ideal": 100 * ours["kept"]["30"]["share"],
        r"keeps \d+%, (\d+)% and \d+% of its ideal": 100 * ours["kept"]["60"]["share"],
        r"keeps \d+%, \d+% and (\d+)% of its ideal": 100 * ours["kept"]["300"]["share"],
        r"nanoGPT keeps (\d+)%": 100 * nanogpt["kept"]["30"]["share"],
        r"loses (\d+) steps on average": sum(lost) / len(lost),
        r"steps on average and (\d+) at most": max(lost),
        r"ended within ([\d.]+) s": max(term["seconds"] for term in ours["sigterm"]),
        r"within (\d+)% of the measured peak": 100 * memory["largest_error"],
        r"cost (-?[\d.]+)% in the median": 100 * watching["median_cost"],
        r"single windows differ by up to (\d+)%": 100 * max(map(abs, watching["costs"])),
        r"in each of (\d+) runs on a CPU": len(memory["results"]),
        r"loss with ([\d.]+) of the tokens": muon["tokens"] / by_tokens(muon, -1)[0],
        r"with twice the tokens ends at ([\d.]+)": by_tokens(adamw, -1)[1],
        r"Muon's seeds differ by ([\d.]+\d)": by_side["muon"]["spread"],
        r"English, Muon ends at ([\d.]+)": large_sides["muon"]["loss"],
        r"or ([\d.]+) with 0.375": by_tokens(large["summary"]["comparison"][0], 0)[1],
        r"of the tokens, and AdamW at ([\d.]+) \(": large_sides["adamw_zero"]["loss"],
        r"Muon takes (\d+)% of a step": 100 * times["sizes"]["demo"]["muon"]["share_of_step"],
        r"and (\d+)% at 30 M": 100 * times["sizes"]["30m"]["muon"]["share_of_step"],
        r"median difference is (-?[\d.]+)%": 100 * overhead["median_cost"],
        r"single ones are up to (\d+)%": 100 * max(map(abs, overhead["costs"])),
    }
    assert by_side["muon"]["learning_rate"] == 0.01 and adamw["side"] == "adamw_zero"
    check_numbers(expected)


def test_numbers_on_data_are_measured():
    """Those on preparation, streaming and large corpora."""
    names = ("data", "streaming", "encoder_equality", "fineweb_edu", "common_crawl")
    data, streaming, equality, fineweb, crawl = (
        section_of(f"scripts/benchmarks/{name}_cpu.json", "") for name in names
    )
    speed = data["speed"]
    tokenizing = {
        name: sum(run["tokenizing_cpu_seconds"] for run in runs) for name, runs in streaming["processes"].items()
    }
    compared = {name: found["bytes"] / 1e9 for name, found in equality["tokenizers"].items()}
    first, *others = compared.values()
    seconds = {name: [of["computed"][str(n)]["seconds"] for n in (2, 16, 64)] for name, of in
               (("fineweb", fineweb), ("crawl", crawl))}  # fmt: skip
    assert len(others) == 5 and not any([*fineweb["differences"].values(), *crawl["differences"].values()])
    expected = {
        r"MB of JSON lines takes ([\d.]+) s": min(speed["200"]["seconds"]["prepare_data"]),
        r"on one core ([\d.]+) times as long": speed["200"]["times_as_fast_as_tiktoken_loop"],
        r"packing takes about (\d+) minutes": 46e3 / (2 * speed["2000"]["megabytes_per_second_per_core"]) / 60,
        r"2 GB run at ([\d.]+) MB/s per core": speed["2000"]["megabytes_per_second_per_core"],
        r"32 packed rows takes ([\d.]+) ms": data["reading"]["batch_of_32_rows_ms"]["large_mmap"],
        r"tokenizes takes (\d+)% of the CPU": 100 * tokenizing["2, one tokenizes"] / tokenizing["2, each tokenizes"],
        r"on ([\d.]+) GB of text for GPT-2's": first,
        r"and on ([\d.]+) GB for five others": sum(others),
        r"which takes ([\d.]+), [\d.]+ and [\d.]+ GB/s": fineweb["computed"]["2"]["disk_megabytes_per_second"] / 1e3,
        r"which takes [\d.]+, ([\d.]+) and [\d.]+ GB/s": fineweb["computed"]["16"]["disk_megabytes_per_second"] / 1e3,
        r"which takes [\d.]+, [\d.]+ and ([\d.]+) GB/s": fineweb["computed"]["64"]["disk_megabytes_per_second"] / 1e3,
        r"`sample-10BT` .* ([\d.]+) minutes \| \d+ s \| \d+ s \| \| 128": seconds["fineweb"][0] / 60,
        r"`sample-10BT` .* minutes \| (\d+) s \| \d+ s \| \| 128": seconds["fineweb"][1],
        r"`sample-10BT` .* minutes \| \d+ s \| (\d+) s \| \| 128": seconds["fineweb"][2],
        r"128 WET files .* ([\d.]+) minutes \| [\d.]+ minutes \| \d+ s \|": seconds["crawl"][0] / 60,
        r"128 WET files .* minutes \| ([\d.]+) minutes \| \d+ s \|": seconds["crawl"][1] / 60,
        r"128 WET files .* minutes \| (\d+) s \|": seconds["crawl"][2],
    }
    check_numbers(expected)
    peaks = {
        kind: max(size["peak_megabytes"] for size in sizes.values() if type(size) is dict)
        for kind, sizes in data["memory"].items()
    }
    english, distinct = map(
        int, re.search(r"less than (\d+) MB of .* less than (\d+) MB if", " ".join(TEXT.split())).groups()
    )
    assert max(peaks["jsonl"], peaks["txt"]) < english and peaks["words"] < distinct


def check_numbers(expected: dict[str, float]) -> None:
    """Compare the number that each pattern finds in the README with a measured one."""
    text = " ".join(TEXT.split())
    for pattern, value in expected.items():
        (shown,) = re.findall(pattern, text)
        assert is_rounded(shown, [value]), (pattern, value)
