"""The small files beside a model's weights: its tokenizer's, and generation_config.json.

A new model gets the files of the tokenizer that it is trained with. A fine-tuned model keeps its own files, including
a chat template, but for the class, which could change the ids of tokenizer.json. What else the run has to change in
them is returned as lines to print.
"""

import json
import tempfile
from pathlib import Path

from huggingface_hub import hf_hub_download, snapshot_download
from tokenizers import Tokenizer
from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast

from recipe.data.encode import PROBE
from recipe.data.tokenizer import (
    ADDING_OPTIONS,
    OWN_CLASS,
    TOKENIZER_CONFIG,
    added_ids,
    as_json,
    for_transformers_4,
    list_ids,
    load_tokenizer,
    saved_files,
    train_tokenizer,
)
from recipe.environment import only_cached
from recipe.errors import UserError, short_reason

GENERATION = "generation_config.json"
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 200}  # nanoGPT's
TOKENIZER_FILES = (
    "tokenizer.json",
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
)
PATH_KEYS = ("_path", "_file", "_dir")  # endings of keys of tokenizer_config.json: name_or_path, tokenizer_file


def new_files(tokenizer: PreTrainedTokenizerFast, model_config: PreTrainedConfig) -> dict[str, bytes]:
    """Return the files of a new model, by name."""
    tokenizer.model_max_length = model_config.max_position_embeddings
    return saved_files(tokenizer) | {GENERATION: new_generation_config(model_config).to_json_string().encode()}


def new_generation_config(model_config: PreTrainedConfig) -> GenerationConfig:
    """Return how a new model generates text, unless told otherwise."""
    eos = model_config.eos_token_id
    length = model_config.max_position_embeddings  # else a pipeline runs out of positions
    return GenerationConfig(bos_token_id=eos, eos_token_id=eos, pad_token_id=eos, max_length=length, **SAMPLING)


def changed_by(files: dict[str, bytes], model_type: str) -> str | None:
    """Return the class with which AutoTokenizer changes the ids of an exported tokenizer.json; None if none does."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in {**files, "config.json": as_json({"model_type": model_type})}.items():
            Path(folder, name).write_bytes(content)
        try:
            loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except Exception:  # each class raises its own
            return "its own class"
    ids = []
    for tokenizer in (loaded.backend_tokenizer, Tokenizer.from_buffer(files["tokenizer.json"])):
        tokenizer.encode_special_tokens = True  # each may have its own setting
        ids.append(tokenizer.encode(PROBE, add_special_tokens=False).ids)
    return None if ids[0] == ids[1] else type(loaded).__name__


def check_tokenizer(name_or_path: str | None, model_type: str) -> None:
    """Raise `UserError` if the exported tokenizer would load as another one. Without a name, one is to be trained."""
    tokenizer = train_tokenizer([PROBE], 300) if name_or_path is None else load_tokenizer(name_or_path)
    by = changed_by(saved_files(tokenizer), model_type)
    if by is not None:
        remedy = "pass the --tokenizer_name of such a model, or another --model_type"
        raise UserError(f"models of type {model_type} load their tokenizer as {by}, which would change it; {remedy}")


def own_files(source: str | Path, names: tuple[str, ...] = (*TOKENIZER_FILES, GENERATION)) -> dict[str, bytes]:
    """Return the files of an existing model or tokenizer, a folder or Hub id. Raises `UserError` if that fails."""
    folder = Path(source)
    try:
        if not folder.is_dir():
            options = {"allow_patterns": list(names), "local_files_only": only_cached(str(source))}
            folder = Path(snapshot_download(str(source), **options))
        paths = [folder / name for name in names if (folder / name).is_file()]
        return {path.name: path.read_bytes() for path in paths if is_inside(path, folder)}
    except Exception as error:  # the Hub client and the file system raise various errors
        raise UserError(f"cannot read the tokenizer of '{source}': {short_reason(error)}") from error


def is_inside(path: Path, folder: Path) -> bool:
    """Return whether a file may be published: it must be inside its folder, or in the Hub cache's blobs."""
    file = path.resolve()
    root = folder.resolve()
    is_cached = root.parent.name == "snapshots" and file.is_relative_to(root.parent.parent / "blobs")
    if is_cached or file.is_relative_to(root):
        return True
    print(f"warning: {path} is a link that leaves its folder, so it is skipped", flush=True)
    return False


def hub_commit(model_id: str, revision: str | None = None) -> str:
    """Return the commit of a Hub model that has been loaded: the name of its folder in the cache."""
    return Path(hf_hub_download(model_id, "config.json", revision=revision, local_files_only=True)).parent.name


def tuned_files(
    source: str | Path,
    tokenizer_source: str | Path,
    model_config: PreTrainedConfig,
    document_prefix: list[int],
    parse_special_tokens: bool,
) -> tuple[dict[str, bytes], list[str]]:
    """Return the files of a fine-tuned model, and how they differ from the original's.

    source, tokenizer_source: folder or Hub id of the original model and of the tokenizer. model_config: of the new
    model. document_prefix, parse_special_tokens: how the text of the dataset was encoded.
    """
    files = own_files(tokenizer_source, TOKENIZER_FILES) | own_files(source, (GENERATION,))
    notes = []
    stored = json.loads(files.get(TOKENIZER_CONFIG, b"{}"))
    config = {key: value for key, value in stored.items() if not key.endswith(PATH_KEYS)}
    changes = for_transformers_4(config)
    if parse_special_tokens:  # scoring reads it
        changes["split_special_tokens"] = False
        if config.get("split_special_tokens"):
            notes.append("the tokenizer parses special tokens in a text from now on, as in the training text")
    tokenizer = load_tokenizer(str(tokenizer_source))
    if document_prefix != added_ids(tokenizer)[0] and "tokenizer.json" in files:
        files["tokenizer.json"] = as_json(json.loads(files["tokenizer.json"]) | {"post_processor": None})
        changes |= {key: False for key in ADDING_OPTIONS if key in config}
        notes.append("the tokenizer puts nothing in front of a text from now on, as in the training text")
    if "tokenizer.json" in files and config.get("tokenizer_class") != OWN_CLASS:
        config = tokenizer.special_tokens_map | config  # the class may know some of them
        config.pop("auto_map", None)
        changes |= for_transformers_4(config | {"tokenizer_class": "TokenizersBackend"})
    if changes or config != stored:
        files[TOKENIZER_CONFIG] = as_json(config | changes)
    generation = json.loads(files.get(GENERATION, b"{}"))
    ends = list_ids(generation.get("eos_token_id"))
    end = tokenizer.eos_token_id
    if ends and end not in ends:
        ids = {"bos_token_id": model_config.bos_token_id, "eos_token_id": end, "pad_token_id": end}
        files[GENERATION] = as_json(generation | {key: value for key, value in ids.items() if key in generation})
    return files, notes
