"""Write the model card of a run, at any of its steps, from the files that the run left.

It may be written while the run continues, and by another process.
"""

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from recipe.errors import short_reason
from recipe.publish.curve import save_loss_chart
from recipe.publish.facts import RunFacts, read_facts
from recipe.publish.markdown import fence, number, plain, table
from recipe.publish.metadata import LOSSES, TASKS, card_metadata, scores_of
from recipe.publish.provenance import (
    describe_data,
    describe_recipe,
    describe_reproduction,
    describe_training,
    name_base_model,
    name_source,
)
from recipe.publish.public import public_name

CARD_NAME, CURVE_NAME = "README.md", "loss_curve.png"
SHOWN_SAMPLES, SAMPLE_CHARACTERS, SAMPLE_WIDTH = 4, 400, 90
SHOWN_BRANCHES = 5
STYLES = {"loss": ".4f", "perplexity": ",.2f", "bits_per_byte": ".4f"}
OPTIMAL_TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022, arXiv:2203.15556
HARMLESS_EPOCHS = 4  # Muennighoff et al. 2023, arXiv:2305.16264


def write_model_card(
    run_dir: Path,
    step: int,
    directory: Path | None = None,
    *,
    revision: str | None = None,
    branches: Sequence[str] = (),
    resumable: bool = False,
    draw: bool = True,
    hub_options: dict[str, Any] | None = None,
) -> None:
    """Write README.md and loss_curve.png into `directory` (default: run_dir) for the model after `step` steps.

    revision: branch of the Hub repository that holds this card, if it is not main. branches: one per intermediate
    checkpoint, oldest first. resumable: the last of them holds the training state. draw: False keeps the image of an
    earlier call. hub_options: replace those of training_config.yaml. If the curve cannot be drawn, the card lacks it
    and a warning is printed.
    """
    directory, facts = directory or run_dir, read_facts(run_dir, step, hub_options)
    directory.mkdir(parents=True, exist_ok=True)
    if draw:
        _draw_curve(facts, directory / CURVE_NAME)
    scores = _scores(facts)
    if (directory / CURVE_NAME).is_file():
        scores += f"\n![Training and validation loss]({CURVE_NAME})\n"
    sections = (
        _introduction(facts),
        scores,
        _usage(facts, revision, branches),
        _samples(facts),
        describe_data(facts),
        describe_training(facts),
        describe_recipe(facts),
        describe_reproduction(facts, branches if resumable else ()),
        _limitations(facts),
    )
    body = "\n".join(filter(None, sections))
    ModelCard(f"---\n{card_metadata(facts).to_yaml()}\n---\n\n{body}").save(directory / CARD_NAME)


def _draw_curve(facts: RunFacts, path: Path) -> None:
    path.unlink(missing_ok=True)  # it may show another step
    if len(facts.of_kind("train")) < 2:
        return
    kind = "eval" if facts.of_kind("eval") else "train"
    name = facts.name if len(facts.name) <= 26 else f"{facts.name[:24]}..."
    label = "validation loss" if kind == "eval" else "training loss"
    try:
        save_loss_chart(facts.events, path, f"{name}: {label} {number(facts.newest(kind)['loss'], '.3f')}")
    except Exception as error:  # matplotlib, its fonts and the file system raise various errors
        print(f"warning: the loss curve could not be drawn ({short_reason(error)})", flush=True)
        path.unlink(missing_ok=True)


def _introduction(facts: RunFacts) -> str:
    model, base, last = facts.start.get("model"), name_base_model(facts), facts.options["max_steps"]
    length = f" of {last:,}" if last else ""
    size = f" with {model['num_parameters']:,} parameters" if model else ""
    origin = f"fine-tuned from {base}" if base else "trained from scratch"
    source = f" of {name_source(facts.data)}" if facts.data else ""
    kind = "GPT-2" if facts.options["model_type"] == "gpt2" else f"`{plain(facts.options['model_type'])}`"
    text = f"A {kind} language model{size}, {origin} on {facts.tokens_seen:,} tokens{source}."
    if facts.step == 0:
        text = f"A {kind} language model{size}, " + (f"a copy of {base}." if base else "with random weights.")
    if model:
        text += (
            f" It has {model['n_layer']} layers of width {model['n_embd']:,} with {model['n_head']} heads, a "
            f"vocabulary of {model['vocab_size']:,} tokens, and a context of {model['n_positions']:,} tokens."
        )
    architecture = (model or {}).get("architecture", "GPT2LMHeadModel")  # older runs do not record it
    text += f" It is a stock `{architecture}`, trained with gpt2-recipe, and it continues text."
    if not facts.is_final:
        when = f"after {facts.step:,}{length} steps" if facts.step else f"before the first{length} steps"
        text += f"\n\n**This is an intermediate checkpoint, {when}.**"
    return f"# {plain(facts.name)}\n\n{text}\n"


def _scores(facts: RunFacts) -> str:
    """Tabulate the losses of the first and the newest evaluation, the tasks, and other texts."""
    evaluations, parts = facts.of_kind("eval"), []
    if evaluations:
        columns = [evaluations[0], evaluations[-1]] if len(evaluations) > 1 else evaluations
        rows = [
            [f"validation {label.lower()}", *(number(column.get(key), STYLES[key]) for column in columns)]
            for key, label in LOSSES.items()
        ]
        start = "base model" if name_base_model(facts) else "untrained"
        header = (f"step {column['step']:,}" if column["step"] else f"step 0 ({start})" for column in columns)
        parts.append(table(["", *header], rows, "right"))
        known = facts.data.get("splits", {}).get("validation", {}).get("rows")
        if num_rows := evaluations[-1].get("num_rows"):
            rows = f"{num_rows:,} of {known:,}" if known else f"{num_rows:,}"
            length = facts.options["block_size"]
            parts.append(f"Loss in nats per token, on {rows} held-out rows of {length:,} tokens.\n")
    tasks = [
        [plain(f"{TASKS.get(task, ('', task, 0))[1]}, {score}"), number(value, ",.4f"), number(count, ",")]
        for task, values in facts.tasks.items()
        for count in [values.get("num_examples")]
        for score, value in scores_of(values).items()
    ]
    if tasks:
        parts.append(table(["task", f"step {facts.step:,}", "examples"], tasks, "right"))
    texts = [
        [plain(public_name(str(text.get("name", "text")))), *(number(text.get(key), STYLES[key]) for key in LOSSES)]
        for text in facts.texts
    ]
    if texts:
        parts.append(table(["text", *(label.lower() for label in LOSSES.values())], texts, "right"))
    return "\n".join(parts)


def _usage(facts: RunFacts, revision: str | None, branches: Sequence[str]) -> str:
    published = facts.options["hub_model_id"]
    model = json.dumps(published or facts.name, ensure_ascii=False)
    prompt = json.dumps(facts.options["sample_prompt"], ensure_ascii=False)
    where = f', revision="{revision}"' if revision else ""
    text = "## How to use it\n\n" + fence(
        "from transformers import pipeline\n\n"
        f'generate = pipeline("text-generation", model={model}{where})\n'
        f'print(generate({prompt}, max_new_tokens=100)[0]["generated_text"])',
        "python",
    )
    if not published:
        text += f"\nHere {plain(model)} stands for the path of the model's folder.\n"
    if branches and not revision:
        shown = [f"`{name}`" for name in branches]
        if len(shown) > SHOWN_BRANCHES:
            shown = [*shown[:2], "...", shown[-1]]
        text += f"\nEarlier checkpoints are branches, named by steps and tokens: {', '.join(shown)}.\n\n" + fence(
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f'name, revision = {model}, "{branches[0]}"\n'
            "model = AutoModelForCausalLM.from_pretrained(name, revision=revision)\n"
            "tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)",
            "python",
        )
    return text


def _samples(facts: RunFacts) -> str:
    """Show samples of the first, the last and some steps between, as they were generated."""
    samples = facts.of_kind("sample")
    count = min(SHOWN_SAMPLES, len(samples))
    chosen = [samples[round(i * (len(samples) - 1) / max(1, count - 1))] for i in range(count)]
    text = "## Samples\n\nNot selected by hand.\n" if samples else ""
    for sample in chosen:
        words = "".join(c if c.isprintable() or c == "\n" else " " for c in str(sample["text"]).expandtabs(4))
        shown = words[:SAMPLE_CHARACTERS] + " [...]" * (len(words) > SAMPLE_CHARACTERS)
        lines = [part for line in shown.splitlines() for part in textwrap.wrap(line, SAMPLE_WIDTH) or [""]]
        text += f"\nStep {sample['step']:,}:\n\n" + fence("\n".join(lines), "text")
    return text


def _limitations(facts: RunFacts) -> str:
    points = [
        "It is a base model, without instruction tuning, safety tuning or any filter. It states falsehoods fluently "
        "and repeats the errors and biases of its text, which the recipe does not filter."
    ]
    if languages := facts.options["hub_language"]:
        codes = ", ".join(f"`{code}`" for code in languages)
        points.append(f"Its text is in {codes}; expect little of other languages.")
    else:
        points.append("The languages of its text were not recorded; expect little of any that the text lacks.")
    context = f"{facts.options['block_size']:,} tokens of context"
    points.append(f"It uses at most {context}; its learned positions do not extend further.")
    parameters, epochs = facts.start.get("model", {}).get("num_parameters"), facts.epochs
    if name_base_model(facts):
        points.append("The limitations and the license of its base model apply as well.")
    elif parameters and (ratio := facts.tokens_seen / parameters) < OPTIMAL_TOKENS_PER_PARAMETER:
        source = "[Hoffmann et al., 2022](https://arxiv.org/abs/2203.15556)"
        usual = f"about {OPTIMAL_TOKENS_PER_PARAMETER} make the best use of compute ({source})"
        points.append(f"It has seen {ratio:.2g} tokens per parameter, where {usual}: it is undertrained for its size.")
    if epochs and epochs > HARMLESS_EPOCHS:
        points.append(f"It has seen its text {epochs:,.0f} times, so it may recite passages of it word for word.")
    return "## Limitations\n\n" + "".join(f"- {point}\n" for point in points)
