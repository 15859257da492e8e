"""Weights without the padding of the vocabulary: copy, write, load."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

WEIGHTS_NAME = "model.safetensors"


def copy_weights(model: PreTrainedModel, model_config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    """The weights as they are exported, without padding and tied ones once, copied into host memory."""
    weights = {
        name: tensor[: model_config.vocab_size] if _is_vocabulary(model, tensor) else tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if not (model_config.tie_word_embeddings and name == "lm_head.weight")
    }
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in weights.items()}


def write_model(
    model: PreTrainedModel, model_config: PreTrainedConfig, weights: dict[str, torch.Tensor], directory: Path
) -> None:
    """Write config, generation config and weights of the unpadded model as a folder that `from_pretrained` loads.

    model: the padded model, unwrapped. model_config: from `build_model_config`. weights: from `copy_weights`.
    """
    model_config.architectures = [type(model).__name__]
    model_config.dtype = "float32"
    model_config.save_pretrained(directory)
    GenerationConfig(
        bos_token_id=model_config.bos_token_id,
        eos_token_id=model_config.eos_token_id,
        pad_token_id=model_config.eos_token_id,
        do_sample=True,
    ).save_pretrained(directory)
    save_file(weights, directory / WEIGHTS_NAME, metadata={"format": "pt"})
    (directory / WEIGHTS_NAME).chmod(0o644)  # safetensors makes its files private (0.8)


def load_weights(model: PreTrainedModel, directory: Path, vocab_size: int) -> None:
    """Put weights written by `write_model` into a padded model, exactly as they were when saved."""
    weights = load_file(directory / WEIGHTS_NAME)
    expected = model.state_dict(keep_vars=True)
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    if weights.keys() != expected.keys():
        raise ValueError(f"{WEIGHTS_NAME} lacks, or has besides: {', '.join(weights.keys() ^ expected.keys())}")
    with torch.no_grad():
        for name, tensor in expected.items():
            (tensor[:vocab_size] if _is_vocabulary(model, tensor) else tensor).copy_(weights[name])
    _zero_padding(model, vocab_size)


def _is_vocabulary(model: PreTrainedModel, tensor: torch.Tensor) -> bool:
    return tensor is model.get_input_embeddings().weight or tensor is model.get_output_embeddings().weight


def _zero_padding(model: PreTrainedModel, vocab_size: int) -> None:
    with torch.no_grad():
        for embeddings in (model.get_input_embeddings(), model.get_output_embeddings()):
            assert isinstance(embeddings, (nn.Embedding, nn.Linear))
            embeddings.weight[vocab_size:] = 0
