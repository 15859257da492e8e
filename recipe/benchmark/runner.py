"""Run the ladder, the ablation and the peers one after the other, and keep what they give after each run.

In: a `Setting` and what was asked for. Out: a JSON file, a Markdown table and a chart beside it, lines on the screen.
"""

import importlib.util
import json
import os
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from recipe.benchmark.ladder import (
    PAYS,
    REFERENCE,
    Rung,
    ablations,
    build_extras,
    build_memory_rungs,
    build_rungs,
    climb,
    options_of,
)
from recipe.benchmark.machine import Machine
from recipe.benchmark.measure import LAP, Goal, Setting, loss_delta, measure
from recipe.benchmark.peers import Peer, measure_peer
from recipe.benchmark.tables import (
    PEER_HEADER,
    SECTIONS,
    TEXT_HEADER,
    notes,
    peer_row,
    save_chart,
    speedups,
    text_row,
    to_markdown,
)
from recipe.environment import describe_environment
from recipe.errors import UserError

# For one run, which is given the larger: seconds, and a share of all the time; but never more than half an hour.
SHORTEST_LIMIT_SECONDS, LONGEST_SHARE, LONGEST_LIMIT_SECONDS = 120, 0.2, 1800
LARGEST_FIT = 1024  # rows a forward
CAN_DRAW = importlib.util.find_spec("matplotlib") is not None


@dataclass
class LadderRunner:
    """Measures and records. seconds: for everything; what has not ended by then is not shown."""

    machine: Machine
    setting: Setting
    goal: Goal
    work: Path
    output_file: Path
    command: str
    seconds: float = float("inf")
    fit: bool = False
    shown: str = ""  # section
    results: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.results = {
            "what": "recipe/train.py in a fresh process for each entry; medians over laps, synchronised",
            "setting": self.setting.says,
            "command": self.command,
            "machine": asdict(self.machine),
            "environment": describe_environment(torch.device(self.machine.device)),
            "flops_per_token": self.setting.flops_per_token,
            "goal": asdict(self.goal),
        }
        self.ends_at = time.monotonic() + self.seconds
        self.rungs = build_rungs(self.machine)
        self.extras = build_extras(self.machine, self.setting.micro_batch, self.setting.global_batch)
        self.memory = build_memory_rungs(self.machine)
        self.top = next(rung.name for rung in reversed(self.rungs) if rung.why_not is None)
        try:  # now, and not when the first run is over
            self.output_file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.output_file.parent):
                pass
        except OSError as error:
            raise UserError(f"cannot write {self.output_file}: {error.strerror}") from error

    def wanted(self, names: list[str] | None) -> set[str]:
        """The names, all if there are none, and the reference. Raises `UserError` for one that is no rung."""
        known = [rung.name for rung in (*self.rungs, *self.extras, *self.memory)]
        for name in names or []:
            if name not in known:
                raise UserError(f"there is no rung '{name}'; the rungs are {', '.join(known)}")
        wanted = {*(names or known), REFERENCE}
        if any(rung.name in wanted for rung in self.extras):  # which are compared with the defaults
            wanted.add(self.top)
        return wanted

    @property
    def ends(self) -> set[str]:
        """The bottom, what losses are compared with, and the top: what comes first where time may be short."""
        return {self.rungs[0].name, REFERENCE, self.top}

    @property
    def paying(self) -> set[str]:
        """What may pay above the top and is quick to try: what comes next."""
        return {self.top, *(rung.name for rung in self.extras if rung.name != "tuned")}

    def run_ladder(self, wanted: set[str]) -> None:
        """The ladder, then what pays above it, then what saves memory; nothing that has been run is run again."""
        for rung, options in climb(self.rungs):
            if rung.name in wanted:
                self.run("ladder", rung, options)
        defaults = best = options_of(self.rungs)
        fastest = next((e for e in self.results["ladder"] if e["name"] == self.top and "step_ms" in e), None)
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
        ladder = self.results.setdefault("ladder", [])
        if not any(entry["name"] == REFERENCE for entry in ladder):
            self.run("ladder", *next(pair for pair in climb(self.rungs) if pair[0].name == REFERENCE))
        top = next((entry for entry in ladder if entry["name"] == self.top and "step_ms" in entry), None)
        for rung, options in ablations(self.rungs):
            if rung.name == "everything" and top is not None:  # it has been measured
                self._announce("ablation", rung.what)
                self._record("ablation", {**top, "name": rung.name, "what": rung.what})
            else:
                self.run("ablation", rung, options)

    def run(self, section: str, rung: Rung, options: dict[str, Any]) -> dict[str, Any]:
        """Measure one rung, show it and record it."""
        for entry in self.results.get(section, []):
            if entry["name"] == rung.name:
                return entry
        entry: dict[str, Any] = {"name": rung.name, "what": rung.what, "options": options}
        self._announce(section, rung.what)
        if rung.why_not is not None:
            entry["not_run"] = rung.why_not
        elif time.monotonic() >= self.ends_at:
            entry["not_run"] = "no time was left"
        else:
            numbers = measure(options, self.setting, self.goal, self.work, self._deadline())
            entry |= {"not_run": numbers["failed"]} if "failed" in numbers else numbers
        if "step_ms" in entry:
            flops = entry["tokens_per_second"] * self.setting.flops_per_token
            entry["mfu"] = flops / self.machine.best_matmul_flops
            if self.machine.data_sheet_tflops:
                entry["mfu_data_sheet"] = flops / self.machine.data_sheet_tflops / 1e12
            if self.fit:
                entry["largest_micro_batch"] = self.largest_micro_batch(options)
        self._record(section, entry)
        return entry

    def _record(self, section: str, entry: dict[str, Any]) -> None:
        self.results.setdefault(section, []).append(entry)
        self.save()
        print(text_row(entry, speedups(self.results, section).get(entry["name"])), flush=True)

    def _announce(self, section: str, what: str) -> None:
        """The table's head where another section begins, and on a terminal what is being measured."""
        if section != self.shown:
            self.shown = section
            print(f"\n{SECTIONS[section]}" + (f"\n{TEXT_HEADER}" if section != "peers" else ""), flush=True)
        if sys.stdout.isatty():
            print(f"  {what:.42} ...", end="\r", flush=True)

    def largest_micro_batch(self, options: dict[str, Any]) -> int | str:
        """By doubling, until the same options with so many rows a forward are out of memory."""
        if self.machine.device != "cuda":
            return "not tried: a CPU swaps, or ends the process, instead of raising an error"
        fits, size = 0, 1
        while size <= LARGEST_FIT:
            sizes = {"per_device_train_batch_size": size, "global_batch_size": size, "logging_steps": 1}
            numbers = measure({**options, **sizes}, self.setting, Goal(LAP), self.work, self._deadline())
            if "failed" in numbers:
                return fits if numbers["failed"] == "out of memory" else f"at least {fits}: {numbers['failed']}"
            fits, size = size, size * 2
        return f"at least {fits}"

    def run_peers(self, peers: list[Peer], rounds: int) -> None:
        """Ours and the others in turns, `rounds` times."""
        ours = {"ours": options_of(self.rungs)}
        if any(peer.ours == "ours_auto" for peer in peers):
            ours["ours_auto"] = {**ours["ours"], "per_device_train_batch_size": "auto"}
        self.results["rounds"] = []
        for _ in range(rounds):
            found: dict[str, Any] = {}
            self.results["rounds"].append(found)
            for name, options in ours.items():
                self._announce("peers", name)
                goal = Goal(self.goal.steps)
                found[name] = measure(options, self.setting, goal, self.work, self._deadline())
                found[name].pop("losses", None)
                self._say(name, found[name])
            for peer in peers:
                self._announce("peers", peer.what)
                found[peer.name] = measure_peer(peer, self.goal.steps, self._deadline())
                self._say(peer.what, found[peer.name])
                self.results["peers"] = [
                    self._compare(peer) for peer in peers if peer.name in self.results["rounds"][0]
                ]
                self.save()
        print(f"\n{PEER_HEADER}")
        for entry in self.results["peers"]:
            print(peer_row(entry), flush=True)

    def _say(self, what: str, numbers: dict[str, Any]) -> None:
        rate = numbers.get("tokens_per_second")
        print(f"  {what:44.44}" + (f"{rate:>10,} tokens/s" if rate else numbers["failed"][:34]), flush=True)

    def _compare(self, peer: Peer) -> dict[str, Any]:
        """How many times as fast ours is, in each round and in the median."""
        command = [Path(part).name if part.startswith("/") else part for part in peer.command]
        entry: dict[str, Any] = {"name": peer.name, "what": peer.what, "command": " ".join(command)}
        entry["sha256"] = peer.sha256
        rounds = [found for found in self.results["rounds"] if peer.name in found]
        pairs = [(found[peer.ours], found[peer.name]) for found in rounds]
        failed = [numbers["failed"] for pair in pairs for numbers in pair if "failed" in numbers]
        pairs = [pair for pair in pairs if not any("failed" in numbers for numbers in pair)]
        if not pairs:
            return {**entry, "not_run": failed[0]}
        times = [mine["tokens_per_second"] / theirs["tokens_per_second"] for mine, theirs in pairs]
        rates = [
            statistics.median(numbers["tokens_per_second"] for numbers in side) for side in zip(*pairs, strict=True)
        ]
        return {
            **entry,
            "our_tokens_per_second": rates[0],
            "tokens_per_second": rates[1],
            "rounds": f"{len(pairs)} of {len(rounds)}",
            "times": round(statistics.median(times), 4),
            "times_of_each_round": [round(value, 4) for value in times],
        }

    def _deadline(self) -> float:
        limit = max(SHORTEST_LIMIT_SECONDS, min(LONGEST_LIMIT_SECONDS, LONGEST_SHARE * self.seconds))
        return min(self.ends_at, time.monotonic() + limit + (self.goal.seconds or 0))

    def save(self) -> None:
        """JSON, Markdown and chart, whole again after every run."""
        ladder = self.results.get("ladder", [])
        order = {rung.name: i for i, rung in enumerate([*self.rungs, *self.extras, *self.memory])}
        for section in ("ladder", "extras", "memory"):
            self.results.get(section, []).sort(key=lambda entry: order[entry["name"]])
        reference = next((e["losses"] for e in ladder if e["name"] == REFERENCE and "losses" in e), {})
        for entry in (entry for section in SECTIONS for entry in self.results.get(section, [])):
            if "losses" in entry:
                entry["loss_delta"] = loss_delta(entry["losses"], reference)
                entry["loss_is_finite"] = None not in entry["losses"].values()
        self.results["finished_at"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        json_text, markdown = json.dumps(self.results, indent=2) + "\n", to_markdown(self.results) + "\n"
        self._write(".json", lambda path: path.write_text(json_text))
        self._write(".md", lambda path: path.write_text(markdown))
        if CAN_DRAW and len(ladder) > 1:
            self._write(".png", lambda path: save_chart(self.results, path))

    def _write(self, suffix: str, write: Callable[[Path], object]) -> None:
        """Put a file in the place of the one before it at once. Raises `UserError` if that fails."""
        path = self.output_file.with_suffix(suffix)
        partial = path.with_name(f".{path.name}.partial")
        try:
            write(partial)
            os.replace(partial, path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise UserError(f"cannot write {path}: {error.strerror}; what was there before is as it was") from error

    def finish(self) -> None:
        """What the numbers mean, and the chart. Raises `UserError` if there are none."""
        entries = [entry for section in SECTIONS for entry in self.results.get(section, [])]
        if all("not_run" in entry for entry in entries):
            raise UserError(f"nothing could be measured: {entries[0]['not_run'] if entries else 'there was no rung'}")
        print("\n" + "\n".join(textwrap.fill(note, 80) for note in notes(self.results)))
        files = [self.output_file.with_suffix(suffix) for suffix in (".json", ".md", ".png")]
        print(f"Results: {', '.join(str(path) for path in files if path.exists())}")


def pays(entry: dict[str, Any], before: dict[str, Any] | None) -> bool:
    """Whether an entry is faster than another by more than the laps of one run differ."""
    if before is None or "step_ms" not in entry or not entry.get("loss_is_finite"):
        return False
    return entry["step_ms"] * PAYS <= before["step_ms"] and entry["step_ms"] < before["step_ms_lowest"]
