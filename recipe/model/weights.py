"""Load pretrained models, and copy, write and load weights without the padding of the vocabulary."""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from recipe.disk import can_map, replaced, share, write_file
from recipe.environment import only_cached
from recipe.errors import UserError, check_local_path, short_reason

CONFIG_JSON = "config.json"
WEIGHTS_NAME = "model.safetensors"
LARGEST_HEADER = 100_000_000  # bytes, as in safetensors


def load_pretrained(auto_class: type, source: str | Path, trust_remote_code: bool = False, **options) -> Any:
    """Call an Auto class's `from_pretrained`. source: folder or Hub id. Raises `UserError` if that fails.

    trust_remote_code: run the code that the model brings. A class that is registered here needs none.
    """
    check_local_path(str(source))
    folder = Path(source)
    if folder.is_dir() and not (folder / "config.json").is_file():
        candidates = sorted((str(path.parent) for path in folder.glob("*/config.json")), key=lambda p: (len(p), p))
        problem = f"there is no model in {folder}"
        if candidates:
            problem += f"; there is one in {', '.join(candidates)}"
        raise UserError(problem)
    disable_progress_bar()  # loading the weights takes milliseconds
    if not folder.is_dir() and only_cached(str(source)):
        options["local_files_only"] = True
    try:
        return auto_class.from_pretrained(source, trust_remote_code=trust_remote_code, **options)
    except Exception as error:  # the Hub, the file system, safetensors and Transformers each raise their own
        if "trust_remote_code" in str(error):
            remedy = "pass --trust_remote_code to a script; in train.py, import the module that registers its classes"
            raise UserError(f"{source} brings its own code, which is not run; {remedy}") from error
        raise UserError(f"cannot load a model from '{source}': {short_reason(error)}") from error


def load_model_weights(source: str | Path, **options) -> PreTrainedModel:
    """Load a causal language model. Raises `UserError` if it lacks weights; Transformers would draw random ones."""
    # Its level has another effect (5.24).
    logging.getLogger("transformers.modeling_utils").addFilter(is_not_load_report)
    model, loaded = load_pretrained(AutoModelForCausalLM, source, output_loading_info=True, **options)
    missing = sorted(loaded["missing_keys"])
    if missing:
        raise UserError(f"the model in {source} lacks weights: {', '.join(missing[:3])}")
    return model


def is_not_load_report(record: logging.LogRecord) -> bool:
    """Drop the report of weights that no model of this type has, such as the masks of old GPT-2 files."""
    return "LOAD REPORT" not in record.getMessage()


def check_vocabulary(num_tokens: int, vocab_size: int, source: str | Path) -> None:
    """Raise `UserError` if a tokenizer has more tokens than the model beside it has embeddings."""
    if num_tokens > vocab_size:
        problem = f"the tokenizer in {source} has {num_tokens:,} tokens, its model only {vocab_size:,}"
        raise UserError(f"{problem}; save the model's own tokenizer beside it")


def full_tensor(tensor: Any) -> torch.Tensor:
    """Return the whole of a tensor, which may be sharded (a DTensor). All processes call it together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Shard a whole tensor like a parameter of its shape. Returns this process's shard, or the whole tensor."""
    if not isinstance(parameter, DTensor):
        return tensor
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)


def copy_weights(model: PreTrainedModel, model_config: PreTrainedConfig, keep: bool = True) -> dict[str, torch.Tensor]:
    """Copy the weights as they are exported, without padding and with tied weights once, into host memory.

    All processes call it together. Without keep, a process only sends its shards, one parameter after the other.
    """
    weights = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name not in model.all_tied_weights_keys:
            values = full_tensor(tensor.detach())
            if keep:
                if is_vocabulary(model, tensor):
                    values = values[: model_config.vocab_size]
                weights[name] = values.to("cpu", copy=True).contiguous()
    return weights


def write_model(
    model: PreTrainedModel,
    model_config: PreTrainedConfig,
    files: Mapping[str, bytes],
    weights: dict[str, torch.Tensor],
    directory: Path,
    header: Mapping[str, str],
) -> None:
    """Write the unpadded model into a folder that `from_pretrained` loads; each file appears when it is complete.

    model: the padded model, unwrapped. model_config: with the real vocabulary. files: the others, by name. weights:
    from `copy_weights`; they come last. header: for `read_header`.
    """
    model_config.architectures = [type(model).__name__]
    model_config.dtype = "float32"
    for name, content in files.items():
        write_file(directory / name, content)
    write_config(model_config, directory)
    with replaced(directory / WEIGHTS_NAME) as partial:
        save_file(weights, partial, metadata={"format": "pt", **header})
        sort_header(partial)
        share(partial, directory / CONFIG_JSON)  # safetensors 0.8 makes its files private


def write_config(model_config: PreTrainedConfig, directory: Path) -> None:
    """Write config.json, with the names of Transformers 4, which converters and servers read, too."""
    content = model_config.to_diff_dict() | (names_of_transformers_4(model_config) or {})
    write_file(directory / CONFIG_JSON, json.dumps(content, indent=2, sort_keys=True) + "\n")


def sort_header(path: Path) -> None:
    """Sort the texts in the header of a safetensors file, whose order is random (0.8): equal runs have equal files."""
    with open(path, "r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        file.seek(8)
        file.write(json.dumps(header, separators=(",", ":")).encode().ljust(size))


def read_header(directory: Path) -> dict[str, str]:
    """Return the texts in the header of a folder's weights; {} if it has none, or if the file is cut off."""
    try:
        with open(directory / WEIGHTS_NAME, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, LARGEST_HEADER)))
            texts = dict(header.pop("__metadata__"))
            end = 8 + size + max(tensor["data_offsets"][1] for tensor in header.values())
            return texts if file.seek(0, os.SEEK_END) == end else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def names_of_transformers_4(model_config: PreTrainedConfig) -> dict[str, Any] | None:
    """Return what version 4 reads under other names than version 5.

    None for rotary embeddings (RoPE) that it cannot describe: one kind for each type of layer.
    """
    if isinstance(model_config, GPT2Config):
        return {"n_ctx": model_config.n_positions}  # llama.cpp's converter reads it
    rope = getattr(model_config, "rope_parameters", None)
    if not rope:
        return {}
    if "rope_theta" not in rope:
        return None
    names = {"rope_theta": "rope_theta", "partial_rotary_factor": "partial_rotary_factor"}
    if model_config.model_type.startswith("gpt_neox"):
        names = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
    old = {names[name]: value for name, value in rope.items() if name in names}
    scaling = {name: value for name, value in rope.items() if name not in names}
    return old | {"rope_scaling": None if rope["rope_type"] == "default" else scaling}


def load_weights(model: PreTrainedModel, directory: Path, vocab_size: int) -> None:
    """Load what `write_model` wrote into a padded model. The padding, which nothing reads, becomes zero.

    Raises `ValueError` for missing or unknown tensors.
    """
    path = directory / WEIGHTS_NAME
    weights = load_file(path) if can_map(path) else load(path.read_bytes())
    state = model.state_dict(keep_vars=True)
    expected = {name: tensor for name, tensor in state.items() if name not in model.all_tied_weights_keys}
    differing = weights.keys() ^ expected.keys()
    if differing:
        raise ValueError(f"{WEIGHTS_NAME} has missing or unknown tensors: {', '.join(differing)}")
    with torch.no_grad():
        for name, tensor in expected.items():
            values = weights[name]
            if is_vocabulary(model, tensor):
                values = F.pad(values, (0, 0) * (values.dim() - 1) + (0, len(tensor) - vocab_size))
            tensor.copy_(shard_like(tensor, values))


def output_layer(model: PreTrainedModel) -> nn.Linear:
    return model.get_output_embeddings()  # pyright: ignore[reportReturnType]  # every causal language model has it


def is_vocabulary(model: PreTrainedModel, tensor: torch.Tensor) -> bool:
    """Return whether a parameter has one row per token: the embeddings, or the output matrix or its bias."""
    head = output_layer(model)
    return any(tensor is rows for rows in (model.get_input_embeddings().weight, head.weight, head.bias))
