"""The Python code of a model class of one's own, which its checkpoints bring."""

import copy
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.dynamic_module_utils import custom_object_save

from recipe.errors import UserError


def own_code(model_config: PreTrainedConfig) -> dict[str, bytes]:
    """Return the modules that define config and model, by file name, and name their classes in the config's auto_map.

    {} for classes of Transformers. Raises `UserError` for classes that no module holds.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(model_config))
    with tempfile.TemporaryDirectory() as folder:
        for thing, auto_class in ((model_config, "AutoConfig"), (model, "AutoModelForCausalLM")):
            module = type(thing).__module__
            if module == "__main__":
                name = type(thing).__name__
                raise UserError(f"{name} is defined in the program; move it to a module, which checkpoints can bring")
            if module.partition(".")[0] != "transformers":
                type(thing).register_for_auto_class(auto_class)
                custom_object_save(thing, folder, config=model_config)  # pyright: ignore[reportArgumentType]
        return {path.name: path.read_bytes() for path in Path(folder).glob("*.py")}
