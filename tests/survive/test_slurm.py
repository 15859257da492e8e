"""Jobs on one or two machines under Slurm: they save, are queued again, and are one run.

The machines are launchers on loopback, and tests/programs/slurm has stand-ins for Slurm's commands.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
from helpers import ROOT, TINY, default_arguments, list_steps, values_of

from recipe.checkpoint import why_damaged

pytestmark = pytest.mark.skipif(not shutil.which("pkill"), reason="the batch files need pkill")
PROGRAMS = ROOT / "tests" / "programs" / "slurm"
JOB_ID = str(os.getpid())
OPTIONS = ["--max_steps", 400, "--eval_steps", 100, "--global_batch_size", 8]


class Cluster:
    """Runs a batch file as Slurm would run it. The jobs share a folder."""

    def __init__(self, folder, dataset_dir):
        self.folder, self.run = folder, folder / "run"
        self.options = [*default_arguments(dataset_dir, self.run, TINY), *OPTIONS, "--save_steps", "40"]

    def submit(self, file):
        inherited = {
            key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "OMP_", "SLURM"))
        }
        return subprocess.Popen(
            ["bash", PROGRAMS / "sbatch", ROOT / "scripts" / "slurm" / file, *map(str, self.options)],
            cwd=ROOT,
            env={**inherited, "SLURM_JOB_ID": JOB_ID, "SLURM_STAND_IN": str(self.folder), "PYTHON": sys.executable},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def submit_and_wait(self, file, step):
        """Return a job that has made a step."""
        job, path = self.submit(file), self.run / "metrics.jsonl"
        given_up_at = time.monotonic() + 120
        while not (path.is_file() and last_complete_step(path) >= step):
            assert job.poll() is None, job.communicate()[0]
            assert time.monotonic() < given_up_at
            time.sleep(0.02)
        return job

    def preempt(self, job):
        """Give notice as `#SBATCH --signal=B:USR1@300` does. Returns the job's output, when it has ended."""
        os.kill(job.pid, signal.SIGUSR1)
        return job.communicate(timeout=120)[0]

    def list_requeued(self):
        return (self.folder / "requeued").read_text().splitlines()


def last_complete_step(path):
    """Return the last training step in a log that is being written."""
    lines = path.read_text().splitlines(keepends=True)
    steps = [json.loads(line)["step"] for line in lines if line.endswith("\n") and '"train"' in line]
    return steps[-1] if steps else 0


@pytest.fixture(scope="module")
def jobs(tmp_path_factory, dataset_dir):
    """A job on two machines that loses one, and the same job again, pre-empted. Returns the cluster and both ends."""
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), dataset_dir)
    job = cluster.submit_and_wait("multi_node.sbatch", 50)
    below = psutil.Process(job.pid).children(recursive=True)
    (launcher,) = (process for process in below if "--machine_rank 1" in " ".join(process.cmdline()))
    for process in (*launcher.children(recursive=True), launcher):
        process.kill()
    killed_at = time.monotonic()
    output = job.communicate(timeout=120)[0]
    lost = output, job.returncode, time.monotonic() - killed_at
    assert len(cluster.list_requeued()) == 1

    job = cluster.submit_and_wait("multi_node.sbatch", 120)
    return cluster, lost, (cluster.preempt(job), job.returncode)


def test_the_other_machines_end_at_once_when_one_is_gone(jobs):
    """The other machine prints one sentence instead of a traceback. The job had saved, so it is queued again."""
    output, status, seconds = jobs[1]
    assert status == 75
    assert seconds < 60
    assert "error: " in output
    assert 'recipe/train.py", line' not in output


def test_a_preempted_job_saves_and_is_queued_again(jobs):
    """The job file lets the launchers wait 600 seconds instead of 30."""
    cluster, _, (output, status) = jobs
    assert status == 75, output
    assert cluster.list_requeued() == 2 * [f"requeue {JOB_ID}"]
    assert output.count("the launcher gives 600 seconds") == 2
    step = list_steps(cluster.run)[-1]
    assert why_damaged(cluster.run / f"checkpoint-{step}") is None


def test_two_machines_are_one_run(jobs, train_shared):
    """From step 0 over the kill to the pre-emption, they train and evaluate as one process does."""
    cluster, _, (output, _) = jobs
    assert "checkpoint-40" in output  # the newest before the kill
    whole = train_shared(*OPTIONS)
    for event, at_least in (("train", 120), ("eval", 2)):
        losses, expected = (values_of(run, "loss", event) for run in (cluster.run, whole))
        assert len(losses) >= at_least
        assert losses == pytest.approx(expected[: len(losses)], abs=1e-5)


def test_a_job_that_branches_continues_its_own_run_when_it_is_queued_again(tmp_path, dataset_dir, train_shared):
    """Not the checkpoint that it names. On one GPU, where `accelerate launch` is no torchrun, however the option of
    the folder is spelled.
    """
    start = train_shared(*OPTIONS, "--max_steps", 5, "--save_steps", 3) / "checkpoint-3"
    cluster = Cluster(tmp_path, dataset_dir)
    where = cluster.options.index("--output_dir")
    cluster.options[where : where + 2] = [f"--output-dir={cluster.run}"]
    cluster.options += ["--resume_from_checkpoint", str(start)]
    for number, step in enumerate((10, 50), start=1):
        job = cluster.submit_and_wait("single_node.sbatch", step)
        output = cluster.preempt(job)
        assert job.returncode == 75, output
        assert len(cluster.list_requeued()) == number
    steps = list_steps(cluster.run)
    assert steps == list(range(4, steps[-1] + 1))
    assert not list(ROOT.glob(".resumable*"))
