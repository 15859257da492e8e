"""Which files of folders and patterns are read as text, and what is the same text in another place."""

import dataclasses
import errno
import json
import os
import pickle
import secrets
import shutil
from pathlib import Path
from unittest.mock import Mock

import datasets
import pytest
from corpora import texts_of, write_jsonl
from helpers import PLAIN, TINY, list_steps, make_documents
from hub_repository import File, Repository

import recipe.environment
from recipe.command_line import load_config
from recipe.data import files
from recipe.data.cache import open_dataset_for
from recipe.data.files import describe_files
from recipe.data.read import Report, list_units, read_unit
from recipe.data.source import TextSource
from recipe.errors import UserError


def names_in(*given: str) -> list[str]:
    return TextSource(given).files.paths


def write_files(*names: str) -> None:
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("text")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_folder_stands_for_its_files_of_text(here):
    """Files are sorted, and ignored ones are counted by reason. Links may lead nowhere or in a circle."""
    write_files("b.md", "b.md.gz", "a.txt", "deep/c.txt", "deep/d.jsonl.gz", "deep/n.json")
    write_files("p.pdf", "q.pdf", "t.tsv", "LICENSE", ".git/description.txt")
    write_files("env/pyvenv.cfg", "env/lib/top_level.txt", "made/dataset_info.json", "made/a.txt")
    write_files("packed/tokenizer/tokenizer.json", "packed/metadata.json", "runs/ladder.json")
    write_files("out/training_config.yaml", "out/metrics.jsonl")
    Path("empty.txt").touch()
    Path("gone.txt").symlink_to("nowhere")
    Path("deep/loop").symlink_to("..")
    found = TextSource((".",)).files
    assert found.paths == ["./a.txt", "./b.md", "./deep/c.txt", "./deep/d.jsonl.gz", "./deep/n.json"]
    of_kinds = {".pdf": 2, ".tsv": 1, "no suffix": 1, "empty": 1, "broken link": 1}
    of_kinds |= {"compressed copy of a file beside it": 1, "folders of runs, models or datasets": 5}
    assert found.ignored == of_kinds
    assert ".pdf (2)" in describe_files(found)


def test_a_folder_that_cannot_be_listed_is_named(here, monkeypatch):
    """Its text would be missing without a word."""
    write_files("deep/b.txt")
    denied = PermissionError(errno.EACCES, "Permission denied", "deep")
    monkeypatch.setattr(os, "scandir", Mock(side_effect=denied))
    with pytest.raises(UserError, match="deep: Permission denied"):
        names_in("deep")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.jsonl", ["a.jsonl"]),
        ("**/c*", ["books/c.jsonl"]),
        ("*/*.jsonl", ["books/b.jsonl", "books/c.jsonl"]),
        ("**/*.jsonl", ["a.jsonl", "books/b.jsonl", "books/c.jsonl"]),
        ("books/**", ["books/b.jsonl", "books/c.jsonl"]),
        ("out/*.jsonl", ["out/metrics.jsonl"]),  # named, although it is a run's
    ],
)
def test_a_pattern_stands_for_the_text_that_matches(here, pattern, expected):
    """A pattern skips folders of results, unless it names them, and ends where links lead in a circle."""
    for name in ("books/x", "books/y"):
        Path(name).mkdir(parents=True)
        Path(name, "one").symlink_to("..")
        Path(name, "two").symlink_to("..")
    write_files("a.jsonl", "books/b.jsonl", "books/c.jsonl", "out/metrics.jsonl", "out/training_config.yaml")
    assert names_in(pattern) == expected


@pytest.mark.parametrize(
    "validation", ["corpus/val.jsonl", "{}/corpus/../corpus/val.jsonl", "link.jsonl", "corpus/v*"]
)
def test_validation_files_are_not_trained_on_however_they_are_named(here, validation):
    """Neither are copies. Each file is read once, and one line counts those that are ignored, each once."""
    Path("corpus").mkdir()
    for name, seed in (("a", 0), ("b", 1), ("val", 2), ("copy", 2)):
        write_jsonl(Path("corpus", f"{name}.jsonl"), make_documents(20, seed))
    Path("link.jsonl").symlink_to("corpus/val.jsonl")
    source = TextSource(("corpus", "corpus/a.jsonl", "corpus/*.jsonl"), (validation.format(here),))
    assert source.files.paths == ["corpus/a.jsonl", "corpus/b.jsonl"]
    assert source.files.ignored == {"named as validation text": 1, "copy of validation text": 1, "named twice": 3}
    assert texts_of(source, "train") == [*make_documents(20), *make_documents(20, seed=1)]
    assert texts_of(source, "validation") == make_documents(20, seed=2)


def test_files_named_for_validation_among_those_for_training_are_named(here):
    assert files.name_splits(["c/train-1.jsonl", "c/validation.jsonl", "c/test.jsonl"]).startswith(
        "warning: used for training, too: c/validation.jsonl, c/test.jsonl;"
    )
    assert files.name_splits(["/home/dev/test/train.jsonl", "/home/dev/test/train-test.jsonl"]) is None
    assert files.name_splits(["tests/validation.txt", "b.txt"]) is None


@pytest.mark.parametrize(("mark", "option"), [("state.json", "--dataset_name"), ("metadata.json", "--dataset_dir")])
def test_a_dataset_is_no_folder_of_text(here, mark, option):
    write_files(f"d/{mark}", "d/dataset_info.json" if mark == "state.json" else "d/tokenizer/tokenizer.json")
    with pytest.raises(UserError, match=option):
        names_in("d")


# ------------------------------------------------------------------ identity


def content_of(*paths: Path | str) -> str:
    return TextSource(tuple(map(str, paths))).inputs["content"]


@pytest.fixture
def old_file(tmp_path):
    """A file whose time shows that it has not just changed."""
    path = Path(write_jsonl(tmp_path / "a.jsonl", ["x"]))
    os.utime(path, (1e9, 1e9))
    return path


def test_a_copy_of_a_local_dataset_has_its_identity(tmp_path):
    """Folder and time do not matter."""
    datasets.Dataset.from_dict({"text": make_documents(9)}).save_to_disk(tmp_path / "a" / "data")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for path in (tmp_path / "b").rglob("*"):
        os.utime(path, (1e9, 1e9))
    a, b = (TextSource(dataset_name=str(tmp_path / name / "data")) for name in "ab")
    assert a.inputs == b.inputs


def test_a_file_that_could_not_be_read_is_read_again(old_file, monkeypatch):
    """An error is not remembered as the content of a file that has not changed since."""
    with monkeypatch.context() as patch:
        patch.setattr(files, "digest_file", lambda _: "unreadable: Permission denied")
        failed = content_of(old_file)
    assert content_of(old_file) != failed


@pytest.mark.parametrize("has_home", [True, False])
def test_digests_are_remembered_in_the_home_folder_if_there_is_one(tmp_path, old_file, monkeypatch, has_home):
    """A numeric user of a container has neither an account nor HOME."""
    expected = content_of(old_file)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    monkeypatch.setattr(files, "cache_dir", recipe.environment.cache_dir)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", "~/cache")
    if not has_home:
        monkeypatch.setattr("os.path.expanduser", lambda text: text)
    assert content_of(old_file) == expected
    assert [path.name for path in home.rglob("*.json")] == ["file_digests.json"] * has_home


@pytest.mark.parametrize("position", [0, 5_100_000, 9_999_999])
def test_an_edit_of_one_byte_anywhere_in_a_file_is_another_text(old_file, position):
    """Also if the edit restores the file's time."""
    content = bytearray(10_000_000)

    def identity() -> str:
        old_file.write_bytes(content)
        os.utime(old_file, (1e9, 1e9))
        return content_of(old_file)

    before = identity()
    assert identity() == before
    content[position] = 1
    assert identity() != before


def test_the_identity_covers_every_option_and_file(tmp_path):
    a = write_jsonl(tmp_path / "a.jsonl", ["x"])
    b = write_jsonl(tmp_path / "b.jsonl", ["y"])
    same_bytes = shutil.copy(a, tmp_path / "a.txt")  # read differently
    base = TextSource((a,))
    on_hub = TextSource(dataset_name="org/data")
    sources = [
        base,
        TextSource((b,)),
        TextSource((a, b)),
        TextSource((str(same_bytes),)),
        TextSource((a,), (b,)),
        dataclasses.replace(base, text_column_name="body"),
        dataclasses.replace(base, document_separator="x"),
        dataclasses.replace(base, validation_split_percentage=7.0),
        dataclasses.replace(base, parse_special_tokens=True),
        on_hub,
        dataclasses.replace(on_hub, dataset_name="org/other"),
        dataclasses.replace(on_hub, dataset_config_name="c"),
        dataclasses.replace(on_hub, dataset_split="test"),
    ]
    assert len({json.dumps(source.inputs) for source in sources}) == len(sources)


# ------------------------------------------------------------------ datasets with a card


def test_a_card_does_not_read_files_outside_of_its_dataset(here):
    """A stranger has written it."""
    for folder in ("mine", "other"):
        Path(folder).mkdir()
    write_jsonl(Path("mine", "a.jsonl"), ["own text"])
    write_jsonl(Path("other", "secret.jsonl"), ["secret"])
    card = "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: {}\n---\n"
    Path("mine", "README.md").write_text(card.format("../other/secret.jsonl"))
    with pytest.raises(UserError, match=r"outside of it: .*secret\.jsonl"):
        list_units(TextSource(dataset_name="mine"))
    datasets.Dataset.from_dict({"text": ["x"]}).save_to_disk("saved")
    Path("saved").rename("other/saved")
    shutil.copytree("other/saved", "copy")
    state = Path("copy", "state.json")
    state.write_text(state.read_text().replace('"data-', '"../other/saved/data-'))
    with pytest.raises(UserError, match="outside of it"):
        list_units(TextSource(dataset_name="copy"))
    Path("mine", "README.md").write_text(card.format('"*.jsonl"'))
    assert texts_of(TextSource(dataset_name="mine")) == ["own text"]


# ------------------------------------------------------------------ datasets on the Hub


@pytest.fixture
def push(hub, monkeypatch):
    """Write commits to a dataset with the configurations a and b on a stand-in for the Hub, as `push(a=..., b=...)`.

    Returns the commit.
    """
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.endpoint)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    repository = hub.repositories["datasets/org/data"] = Repository(False)
    card = "---\nconfigs:\n- config_name: a\n  data_files: a/*.jsonl\n- config_name: b\n  data_files: b/*.jsonl\n---\n"

    def commit(**texts: list[str]) -> str:
        content = {name: "".join(json.dumps({"text": text}) + "\n" for text in of) for name, of in texts.items()}
        written = {f"{name}/1.jsonl": File(lines.encode(), False) for name, lines in content.items()}
        written["README.md"] = File((card + secrets.token_hex(4)).encode(), False)
        return repository.write_commit("main", None, "", written)

    return commit


@pytest.fixture
def open_with(tmp_path, tokenizer_dir):
    """Open the prepared dataset of a run on configuration a, with more options."""
    argv = ["--dataset_name", "org/data", "--dataset_config_name", "a", "--tokenizer_name", str(tokenizer_dir)]
    argv += ["--cache_dir", str(tmp_path / "cache"), "--block_size", "16"]
    return lambda *options: open_dataset_for(load_config([*argv, *options])[0])


def test_a_hub_dataset_is_the_files_of_its_configuration_at_one_commit(hub, push, open_with):
    """A push of other files leaves it the same; a push of its files makes another.

    Without the Hub, it is what was prepared: of the newest commit, or of the one that is asked for, but never another.
    """
    documents = make_documents(200)
    first = push(a=documents, b=["other"])
    made = open_with()
    assert made.metadata["source"]["dataset_revision"] == first
    assert sum(split["documents"] for split in made.metadata["splits"].values()) == 200
    second = push(a=documents, b=["new", "files"])
    assert open_with().directory == made.directory
    third = push(a=documents[:150], b=["new", "files"])
    newest = open_with()
    assert newest.metadata["source"]["dataset_revision"] == third
    assert newest.directory != made.directory
    assert open_with("--dataset_revision", second).directory == made.directory
    hub.fail("api/datasets", 503, None)
    assert open_with().directory == newest.directory
    assert open_with("--dataset_revision", first).directory == made.directory
    with pytest.raises(UserError, match="org/data"):
        open_with("--dataset_revision", "0" * 40)


def test_a_process_that_tokenizes_reads_the_commit_of_its_run_after_a_push(push):
    first = push(a=make_documents(200), b=["other"])
    source = TextSource(dataset_name="org/data", dataset_config_name="a")
    assert source.commit == first
    push(a=make_documents(150), b=["other"])
    sent = pickle.loads(pickle.dumps(source))
    assert sent.commit == first
    assert len(list(read_unit(sent, list_units(sent)[0], Report()))) == 200


def test_a_resumed_run_reads_the_commit_that_it_began_with(here, tokenizer_dir, train, push):
    """The run keeps its commit even if the Hub has a newer one and the prepared text is gone."""
    first = push(a=make_documents(200), b=["other"])
    data = ["--dataset_name", "org/data", "--dataset_config_name", "a", "--tokenizer_name", tokenizer_dir]
    run = [*data, *TINY, *PLAIN, "--global_batch_size", 4, "--output_dir", "run", "--resume_from_checkpoint", "auto"]
    train(*run, "--max_steps", 1, alone=True)
    push(a=make_documents(200, seed=1), b=["other"])
    shutil.rmtree("runs")
    train(*run, "--max_steps", 2, alone=True)
    assert list_steps(Path("run")) == [1, 2]
    assert f"dataset_revision: {first}\n" in Path("run", "training_config.yaml").read_text()
