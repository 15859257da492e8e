"""Publishing uploads only the model, never ends a run, and says how to repeat it."""

from unittest.mock import create_autospec

import pytest
from huggingface_hub import HfApi
from huggingface_hub.utils import filter_repo_objects

from recipe.publish import hub

PUSH = ["--push_to_hub", "--hub_model_id", "someone/tiny", "--save_steps", "4"]


@pytest.fixture
def api(monkeypatch):
    """A client with the signatures of the real one that sends nothing."""
    client = create_autospec(HfApi, instance=True)
    client.create_repo.side_effect = lambda repo_id, **options: f"https://huggingface.co/{repo_id}"
    monkeypatch.setattr(hub, "HfApi", create_autospec(HfApi, return_value=client))
    return client


def test_a_run_uploads_its_model_folder(train, api, dataset_dir, capsys):
    """Weights, config, tokenizer, card and metrics are uploaded; checkpoints and local paths are not."""
    output_dir = train(*PUSH, "--hub_private_repo")
    api.create_repo.assert_called_once_with("someone/tiny", private=True, exist_ok=True)
    (upload,) = api.upload_folder.call_args_list
    assert (upload.kwargs["repo_id"], upload.kwargs["folder_path"]) == ("someone/tiny", output_dir)
    names = [str(p.relative_to(output_dir)) for p in output_dir.rglob("*") if p.is_file()]
    sent = set(filter_repo_objects(names, allow_patterns=upload.kwargs["allow_patterns"]))
    assert sent == set(hub.PUBLISHED)
    private = str(dataset_dir.parent.parent).encode()  # the folder of corpus, dataset and run
    assert not any(private in (output_dir / name).read_bytes() for name in sent)
    assert "published at https://huggingface.co/someone/tiny" in capsys.readouterr().out


def test_a_failed_upload_does_not_end_the_run(train, api, monkeypatch, capsys):
    """A missing login is a warning before training; after it, the run prints the command that repeats the upload."""
    monkeypatch.setattr(hub, "get_token", lambda: None)
    api.create_repo.side_effect = ConnectionError("no route to the Hub")
    output_dir = train(*PUSH)
    printed = capsys.readouterr().out
    assert printed.index("unless you log in") < printed.index("untrained")
    assert "upload to the Hub failed: ConnectionError: no route to the Hub" in printed
    assert f"hf upload someone/tiny {output_dir} . \\\n        --include README.md \\\n" in printed
    assert (output_dir / "model.safetensors").is_file()
