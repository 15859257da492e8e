"""Publishing is never fatal, uploads the model only, and says how to repeat it."""

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.utils import filter_repo_objects

from recipe.publish import card, hub


class FakeApi:
    calls: list = []
    fail = False

    def create_repo(self, repo_id, **kwargs):
        if self.fail:
            raise ConnectionError("no route to the Hub")
        self.calls.append(("create_repo", repo_id, kwargs))
        return f"https://huggingface.co/{repo_id}"

    def upload_folder(self, **kwargs):
        self.calls.append(("upload_folder", kwargs["repo_id"], kwargs))


@pytest.fixture
def api(monkeypatch):
    monkeypatch.setattr(hub, "HfApi", FakeApi)
    monkeypatch.setattr(FakeApi, "calls", [])
    return FakeApi


PUSH = ["--push_to_hub", "--hub_model_id", "someone/tiny", "--save_steps", "4"]


def test_the_model_folder_is_uploaded(train, api, dataset_dir, capsys):
    """Weights, config, tokenizer, card and metrics; no checkpoint, no file that names local paths."""
    output_dir = train(*PUSH, "--hub_private_repo")
    (_, created, options), (_, uploaded, kwargs) = api.calls
    assert created == uploaded == "someone/tiny" and options["private"] is True
    names = [str(p.relative_to(output_dir)) for p in output_dir.rglob("*") if p.is_file()]
    sent = set(filter_repo_objects(names, allow_patterns=kwargs["allow_patterns"]))
    assert sent == set(hub.PUBLISHED)
    folder = str(dataset_dir.parent.parent).encode()  # of the corpus, the dataset and the run
    assert not any(folder in (output_dir / name).read_bytes() for name in sent)
    assert "published at https://huggingface.co/someone/tiny" in capsys.readouterr().out


def test_a_failed_upload_costs_nothing(train, api, monkeypatch, capsys):
    """The run ends well, the model is there, and the command to repeat the upload is printed."""
    monkeypatch.setattr(api, "fail", True)
    output_dir = train(*PUSH)
    printed = capsys.readouterr().out
    assert "upload to the Hub failed: ConnectionError: no route to the Hub" in printed
    assert f"hf upload someone/tiny {output_dir} . \\\n        --include README.md \\\n" in printed
    assert (output_dir / "model.safetensors").is_file()


def test_a_missing_login_is_said_before_training(train, api, monkeypatch, capsys):
    monkeypatch.setattr(hub, "get_token", lambda: None)
    train(*PUSH)
    printed = capsys.readouterr().out
    assert printed.index("will fail unless you log in") < printed.index("untrained")


def test_the_card(train):
    """The Hub can read the card, and it holds the numbers of the run."""
    card = ModelCard.load(train() / "README.md")
    assert card.data.library_name == "transformers" and card.data.pipeline_tag == "text-generation"
    assert "validation loss" in card.text and "| source | corpus.jsonl |" in card.text


def test_the_source_on_the_card():
    """Names without folders, and the dataset's id as it is."""
    assert card.describe_source({"train_files": ["/a/b.txt", "c/d.txt"], "validation_files": []}) == "b.txt, d.txt"
    assert card.describe_source(
        {"dataset_name": "HuggingFaceFW/fineweb-edu", "dataset_config_name": "sample-10BT"}
    ) == ("HuggingFaceFW/fineweb-edu, sample-10BT")
