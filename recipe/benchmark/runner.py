"""Run the ladder, the ablation and the comparison with other programs.

After every run, the results are on the screen, in a JSON file, and in a Markdown table and a chart beside it.
"""

import json
import shlex
import statistics
import sys
import tempfile
import textwrap
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from recipe.benchmark.charts import save_ladder_chart
from recipe.benchmark.ladder import (
    REFERENCE,
    SMALL_CARD,
    Rung,
    ablations,
    build_extras,
    build_memory_rungs,
    build_rungs,
    climb,
    options_of,
)
from recipe.benchmark.machine import Machine
from recipe.benchmark.measure import LAP, Setting, loss_delta, measure, replace_file, utc_now
from recipe.benchmark.peers import Peer, measure_peer
from recipe.benchmark.tables import SECTIONS, notes, screen_header, screen_row, to_markdown, with_speedups
from recipe.errors import UserError

PAYS = 1.01  # an extra is kept if it is this many times as fast, and faster than any lap before it
# Time limit of one run: the larger of these seconds and of this share of all the time, but at most half an hour.
SHORTEST_LIMIT_SECONDS, LONGEST_SHARE, LONGEST_LIMIT_SECONDS = 120, 0.2, 1800
LARGEST_FIT = 1024  # rows per forward pass


@dataclass
class LadderRunner:
    """Measures and records the rungs. seconds: time limit; rungs that do not fit are recorded as not run."""

    machine: Machine
    setting: Setting
    num_steps: int  # that are timed in each run
    work: Path
    output_file: Path
    seconds: float = float("inf")
    fit: bool = False
    shown: str = ""  # the section on the screen
    results: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        machine = asdict(self.machine)
        self.results = {
            "setting": self.setting.says,
            "command": shlex.join(["python", *sys.argv]),
            "environment": machine.pop("environment"),
            "machine": machine,
            "flops_per_token": self.setting.flops_per_token,
            "goal": {"steps": self.num_steps},
        }
        self.ends_at = time.monotonic() + self.seconds
        self.rungs = build_rungs(self.machine)
        self.extras = build_extras(self.machine, self.setting.micro_batch, self.setting.global_batch)
        self.memory = build_memory_rungs(self.machine)
        self.top = next(rung.name for rung in reversed(self.rungs) if rung.why_not is None)
        try:  # before the first run takes its time
            self.output_file.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.output_file.parent).close()
        except OSError as error:
            raise UserError(f"cannot write {self.output_file}: {error.strerror}") from error

    def wanted(self, names: list[str] | None) -> set[str]:
        """Return these rungs, or all, and the ones they are compared with. Raises `UserError` for an unknown name."""
        known = [rung.name for rung in (*self.rungs, *self.extras, *self.memory)]
        for name in names or []:
            if name not in known:
                raise UserError(f"there is no rung '{name}'; the rungs are {', '.join(known)}")
        wanted = {*(names or known), REFERENCE}
        return wanted | {self.top} if any(rung.name in wanted for rung in self.extras) else wanted

    def run_all(self, wanted: set[str], peers: list[Peer], rounds: int) -> None:
        """Run everything. What matters most comes first, because time may run out."""
        self.run_ladder(wanted & {self.rungs[0].name, REFERENCE, self.top})
        self.run_peers(peers, rounds)
        self.run_ladder(wanted & {self.top, *(rung.name for rung in self.extras if rung.name != "tuned")})
        self.run_ladder(wanted - {SMALL_CARD})
        self.run_ablation()
        self.run_ladder(wanted)

    def run_ladder(self, wanted: set[str]) -> None:
        """Run the ladder, then the extras, then the options that save memory. Nothing runs twice."""
        for rung, options in climb(self.rungs):
            if rung.name in wanted:
                self.run("ladder", rung, options)
        defaults = best = options_of(self.rungs)
        fastest = self._find("ladder", self.top)
        for rung in self.extras:
            if rung.name in wanted:
                entry = self.run("extras", rung, {**best, **rung.on})
                entry["kept"] = pays(entry, fastest)
                if entry["kept"]:
                    best, fastest = {**best, **rung.on}, entry
        for rung in self.memory:
            if rung.name in wanted:
                self.run("memory", rung, {**defaults, **rung.on})
        self.save()

    def run_ablation(self) -> None:
        """Run everything on, one switch off at a time, and everything on again."""
        if self._find("ladder", REFERENCE) is None:
            self.run("ladder", *next(pair for pair in climb(self.rungs) if pair[0].name == REFERENCE))
        top = self._find("ladder", self.top) or {}
        for rung, options in ablations(self.rungs):
            if rung.name == "everything" and "step_ms" in top:  # already measured
                self._record("ablation", {**top, "name": rung.name, "what": rung.what})
            else:
                self.run("ablation", rung, options)

    def run(self, section: str, rung: Rung, options: dict[str, Any]) -> dict[str, Any]:
        """Measure one rung, unless that is done, then show and record it."""
        if (entry := self._find(section, rung.name)) is not None:
            return entry
        entry = {"name": rung.name, "what": rung.what, "options": options}
        self._announce(section, rung.what)
        if rung.why_not is not None:
            entry["not_run"] = rung.why_not
        elif time.monotonic() >= self.ends_at:
            entry["not_run"] = "no time left"
        else:
            numbers = measure(options, self.setting, self.num_steps, self.work, self._deadline())
            entry |= {"not_run": numbers["failed"]} if "failed" in numbers else numbers
        if "step_ms" in entry:
            entry |= self.machine.utilization(entry["tokens_per_second"] * self.setting.flops_per_token)
            if self.fit:
                entry["largest_micro_batch"] = self.largest_micro_batch(options)
        self._record(section, entry)
        return entry

    def _find(self, section: str, name: str) -> dict[str, Any] | None:
        return next((entry for entry in self.results.get(section, []) if entry["name"] == name), None)

    def _record(self, section: str, entry: dict[str, Any]) -> None:
        self.results.setdefault(section, []).append(entry)
        self.save()
        self._announce(section)
        shown = next(e for e in with_speedups(self.results, section) if e["name"] == entry["name"])
        print(screen_row(shown, section), flush=True)

    def _announce(self, section: str, what: str | None = None) -> None:
        """Print the header where a new section begins and, on a terminal, what is being measured."""
        if section != self.shown:
            self.shown = section
            print(screen_header(section), flush=True)
        if what and sys.stdout.isatty():
            print(f"{what} ...", end="\r", flush=True)

    def largest_micro_batch(self, options: dict[str, Any]) -> int | str:
        """Double the rows per forward pass until memory runs out."""
        if self.machine.device != "cuda":
            return "not tried: a CPU swaps or kills the process instead of raising an error"
        fits, size = 0, 1
        while size <= LARGEST_FIT:
            sizes = {"per_device_train_batch_size": size, "global_batch_size": size, "logging_steps": 1}
            numbers = measure({**options, **sizes}, self.setting, LAP, self.work, self._deadline())
            if "failed" in numbers:
                return fits if numbers["failed"] == "out of memory" else f"at least {fits}: {numbers['failed']}"
            fits, size = size, size * 2
        return f"at least {fits}"

    def run_peers(self, peers: list[Peer], rounds: int) -> None:
        """Run our program and the others in turn, ours first, `rounds` times."""
        ours = {"ours": options_of(self.rungs)}
        if any(peer.ours == "ours_auto" for peer in peers):
            ours["ours_auto"] = {**ours["ours"], "per_device_train_batch_size": "auto"}
        self.results["rounds"] = []
        for number in range(1, rounds + 1):
            found: dict[str, Any] = {}
            self.results["rounds"].append(found)
            print(f"\nOther programs, round {number} of {rounds}, tokens/s:", flush=True)
            for name, options in ours.items():
                found[name] = measure(options, self.setting, self.num_steps, self.work, self._deadline())
                say_rate(name, found[name])
            for peer in peers:
                found[peer.name] = measure_peer(peer, self.num_steps, self._deadline())
                say_rate(peer.name, found[peer.name])
                started = self.results["rounds"][0]
                self.results["peers"] = [self._compare(peer) for peer in peers if peer.name in started]
                self.save()
        print(screen_header("peers"))
        for entry in self.results["peers"]:
            print(screen_row(entry, "peers"), flush=True)

    def _compare(self, peer: Peer) -> dict[str, Any]:
        """Compute how many times as fast ours is, in each round and in the median."""
        command = " ".join(Path(part).name if part.startswith("/") else part for part in peer.command)
        entry = {"name": peer.name, "what": peer.what, "command": command, "sha256": peer.sha256}
        rounds = [(found[peer.ours], found[peer.name]) for found in self.results["rounds"] if peer.name in found]
        pairs = [(mine, theirs) for mine, theirs in rounds if "failed" not in {*mine, *theirs}]
        if not pairs:
            mine, theirs = rounds[0]
            return {**entry, "not_run": {**theirs, **mine}["failed"]}
        times = [mine["tokens_per_second"] / theirs["tokens_per_second"] for mine, theirs in pairs]
        return {
            **entry,
            "our_tokens_per_second": statistics.median(mine["tokens_per_second"] for mine, _ in pairs),
            "tokens_per_second": statistics.median(theirs["tokens_per_second"] for _, theirs in pairs),
            "rounds": f"{len(pairs)} of {len(rounds)}",
            "times": round(statistics.median(times), 4),
            "times_of_each_round": [round(value, 4) for value in times],
        }

    def _deadline(self) -> float:
        limit = max(SHORTEST_LIMIT_SECONDS, min(LONGEST_LIMIT_SECONDS, LONGEST_SHARE * self.seconds))
        return min(self.ends_at, time.monotonic() + limit)

    def save(self) -> None:
        """Replace JSON, Markdown and chart by complete new ones."""
        order = {rung.name: i for i, rung in enumerate([*self.rungs, *self.extras, *self.memory])}
        for section in ("ladder", "extras", "memory"):
            self.results.get(section, []).sort(key=lambda entry: order[entry["name"]])
        reference = (self._find("ladder", REFERENCE) or {}).get("losses", {})
        for entry in (entry for section in SECTIONS for entry in self.results.get(section, [])):
            if "losses" in entry:
                entry["loss_delta"] = loss_delta(entry["losses"], reference)
                entry["loss_is_finite"] = None not in entry["losses"].values()
        self.results["finished_at"] = utc_now()
        json_text, markdown = json.dumps(self.results, indent=2) + "\n", to_markdown(self.results) + "\n"
        replace_file(self.output_file, lambda path: path.write_text(json_text))
        replace_file(self.output_file.with_suffix(".md"), lambda path: path.write_text(markdown))
        if len(self.results.get("ladder", [])) > 1:
            replace_file(self.output_file.with_suffix(".png"), lambda path: save_ladder_chart(self.results, path))

    def finish(self) -> None:
        """Print what the numbers mean. Raises `UserError` if there are none."""
        entries = [entry for section in SECTIONS for entry in self.results.get(section, [])]
        if all("not_run" in entry for entry in entries):
            raise UserError(f"nothing could be measured: {entries[0]['not_run']}")
        print("\n" + "\n".join(textwrap.fill(line, 80) for line in notes(self.results)))
        files = [self.output_file.with_suffix(suffix) for suffix in (".json", ".md", ".png")]
        print(f"Results: {', '.join(str(path) for path in files if path.exists())}")


def say_rate(name: str, numbers: dict[str, Any]) -> None:
    print(f"{name:20}{numbers.get('tokens_per_second') or numbers['failed']:>10}"[:80], flush=True)


def pays(entry: dict[str, Any], before: dict[str, Any] | None) -> bool:
    """Return whether an entry is faster than another one by more than that one's laps differ."""
    if "step_ms" not in entry or "step_ms" not in (before or {}) or not entry.get("loss_is_finite"):
        return False
    return entry["step_ms"] * PAYS <= before["step_ms"] and entry["step_ms"] < before["step_ms_lowest"]
