"""Compress a saved model: magnitude pruning and int8 weights, each saved as a stock model folder, and its costs.

GPT-2's projections are `Conv1D` layers with weights [in, out]. Converters that look for `nn.Linear` skip all of them
and report success, so the functions here count what was really converted.
"""

import importlib.util
import json
import logging
import os
import shutil
import statistics
import time
from pathlib import Path

import torch
from huggingface_hub import ModelCard
from safetensors import SafetensorError
from torch import nn
from torch.nn.utils import prune
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.pytorch_utils import Conv1D

from recipe.data.tokenizer import save_tokenizer
from recipe.errors import UserError, short_reason
from recipe.model.weights import load_pretrained
from recipe.publish.card import CARD_NAME

NEW_TOKENS = 64  # per timed generation
ROUNDS = 5  # timed generations of each model; the table shows their median


def check_request(model_dir: Path, output_dir: Path, quantize: str | None, amount: float | None) -> None:
    """Raise `UserError` for options, folders or a missing library that cannot work, before a model is loaded."""
    if quantize is None and amount is None:
        raise UserError("nothing to do: pass --quantize int8, --prune 0.3, or both")
    if amount is not None and not 0 < amount < 1:
        raise UserError(f"prune is the fraction of weights to remove; it must be between 0 and 1, got {amount}")
    if not (model_dir / "config.json").is_file():
        inner = sorted(str(path.parent) for path in model_dir.glob("*/config.json"))
        hint = f"; there is one in {', '.join(inner)}" if inner else "; pass the folder of a run or of a checkpoint"
        raise UserError(f"there is no model in {model_dir}{hint}")
    try:
        config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
        method = config.get("quantization_config", {}).get("quant_method")
    except (ValueError, AttributeError) as error:
        raise UserError(f"{model_dir}/config.json is not a model's config: {short_reason(error)}") from error
    if method is not None:
        raise UserError(f"the model in {model_dir} is already quantized ({method}); pass the original model")
    if output_dir.resolve() == model_dir.resolve():
        raise UserError(f"output_dir is the model's own folder {model_dir}; pass another one")
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        raise UserError(f"output_dir {output_dir} already exists and is not an empty folder; pass another one")
    if quantize is not None and importlib.util.find_spec("bitsandbytes") is None:
        raise UserError('--quantize int8 needs bitsandbytes: pip install -e ".[quantize]"')


def compress_model(
    model_dir: Path,
    tokenizer: PreTrainedTokenizerBase,
    output_dir: Path,
    quantize: bool = False,
    amount: float | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, float]:
    """Prune, then quantize a saved model, and write it with its tokenizer as a folder that `from_pretrained` loads.

    amount: the fraction of weights to prune. Returns num_projections, and zero_fraction or int8_layers or both. Raises
    `UserError` if nothing can be converted or the folder cannot be written; output_dir appears only when complete.
    """
    model = load_pretrained(AutoModelForCausalLM, model_dir)
    facts: dict[str, float] = {"num_projections": len(find_projections(model))}
    partial = output_dir.absolute().with_name(f".{output_dir.absolute().name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        if amount is not None:
            facts["zero_fraction"] = prune_model(model, amount)
            model.save_pretrained(partial)
        if quantize:  # the integration converts while it loads; int8 keeps zeros, because its scale has no offset
            model = load_as_int8(model_dir if amount is None else partial, device)
            facts["int8_layers"] = count_int8_layers(model)
            model.save_pretrained(partial)
        save_tokenizer(tokenizer, partial, model.config.max_position_embeddings)
        for path in partial.iterdir():
            path.chmod(partial.stat().st_mode & 0o666)  # safetensors 0.8 makes its files private
        os.replace(partial, output_dir)
    except (OSError, SafetensorError) as error:
        raise UserError(f"the model could not be written to {output_dir}: {short_reason(error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return facts


def find_projections(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the blocks' matrices by name: four per block in GPT-2. Embeddings and the tied head are not among them.

    Raises `UserError` if there are none.
    """
    projections = {name: m for name, m in model.base_model.named_modules() if isinstance(m, (Conv1D, nn.Linear))}
    if not projections:
        raise UserError(f"{type(model).__name__} has no Conv1D or Linear layer in its blocks, so nothing to compress")
    return projections


def prune_model(model: PreTrainedModel, amount: float) -> float:
    """Set the weights of smallest magnitude to zero, the same fraction of each projection, in place and for good.

    Returns the fraction of zeros among the projections' weights. Pruning per layer leaves no layer empty. Ranking all
    layers together differed by at most 0.005 nats per token for 30% and 50%, and was worse for 70% in one of two
    models.
    """
    weights = []
    for module in find_projections(model).values():
        prune.l1_unstructured(module, "weight", amount)
        prune.remove(module, "weight")
        weights.append(module.weight)
    return sum(int((weight == 0).sum()) for weight in weights) / sum(weight.numel() for weight in weights)


def load_as_int8(model_dir: Path, device: torch.device | str) -> PreTrainedModel:
    """Load a model with int8 projections, one scale per output channel, and everything else in float16.

    LLM.int8() (arXiv 2208.07339) of bitsandbytes, whose Transformers integration transposes `Conv1D`. The embeddings
    stay float16: an int8 head beside them would untie the two and make the file larger. float16 because that is the
    type bitsandbytes computes in; it logs a warning per layer and token for any other. Raises `UserError` unless
    every projection was converted.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # 0.50 warns about a 4-bit kernel on CPUs
    options = {"quantization_config": BitsAndBytesConfig(load_in_8bit=True), "dtype": torch.float16}
    model = load_pretrained(AutoModelForCausalLM, model_dir, **options, device_map={"": device}).eval()
    found, converted = len(find_projections(model)), count_int8_layers(model)
    if converted != found:
        raise UserError(f"only {converted} of the {found} projections in {model_dir} were converted to int8")
    return model


def count_int8_layers(model: PreTrainedModel) -> int:
    """Count the projections whose weights are int8."""
    return sum(module.weight.dtype == torch.int8 for module in find_projections(model).values())


def measure_models(
    models: dict[str, PreTrainedModel], directories: dict[str, Path], prompt_ids: torch.Tensor
) -> dict[str, dict[str, float]]:
    """Return each model's disk_bytes (weight files), memory_bytes (weights) and tokens_per_second.

    The models take turns, so a disturbance of the machine affects all of them. prompt_ids: int64 [1, tokens]; greedy
    generation adds NEW_TOKENS tokens, or as many as fit into the context. The first round warms up.
    """
    seconds: dict[str, list[float]] = {name: [] for name in models}
    block_size = next(iter(models.values())).config.max_position_embeddings
    prompt_ids = prompt_ids[:, : max(1, block_size // 2)]
    num_new = min(NEW_TOKENS, block_size - prompt_ids.shape[1])
    for _ in range(ROUNDS + 1):
        for name, model in models.items():
            ids = prompt_ids.to(model.device)
            options = {"do_sample": False, "max_new_tokens": num_new, "min_new_tokens": num_new}
            started_at = time.perf_counter()
            # .cpu() waits for the device
            model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options).cpu()
            seconds[name].append(time.perf_counter() - started_at)
    return {
        name: {
            "disk_bytes": sum(path.stat().st_size for path in directories[name].glob("*.safetensors")),
            "memory_bytes": model.get_memory_footprint(),
            "tokens_per_second": num_new / statistics.median(seconds[name][1:]),
        }
        for name, model in models.items()
    }


def append_to_card(model_dir: Path, output_dir: Path, text: str) -> None:
    """Copy the model's card, if it has one, without its scores, and add a paragraph about the compression."""
    if (model_dir / CARD_NAME).is_file():
        content = (model_dir / CARD_NAME).read_text(encoding="utf-8")
        card = ModelCard(content)
        if card.data.eval_results:
            card.data.model_name = card.data.eval_results = None
            content = str(card)
        (output_dir / CARD_NAME).write_text(f"{content.rstrip()}\n\n{text}\n", encoding="utf-8")


def describe_changes(facts: dict[str, float], config: PreTrainedConfig) -> str:
    """Return what `compress_model` did, in sentences."""
    sentences = []
    if "zero_fraction" in facts:
        where = f"the weights in {facts['num_projections']} projections are zero"
        sentences.append(f"{facts['zero_fraction']:.2%} of {where} (magnitude pruning per layer).")
        sentences.append("They are stored like any others: pruning alone changes neither the file's size nor speed.")
    if "int8_layers" in facts:
        layers = f"{facts['int8_layers']} projections ({config.num_hidden_layers} blocks)"
        sentences.append(f"The weights of {layers} are int8, all others float16.")
        sentences.append("Loading the model needs `pip install bitsandbytes`.")
    return " ".join(sentences)
