"""Jobs on one or two machines under Slurm: they save, are queued again, and are one run.

The machines are launchers on loopback, and tests/programs/slurm has stand-ins for Slurm's commands.
"""

import os
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
from faults import last_step
from helpers import ROOT, TINY, default_arguments, list_steps, read_events

from recipe.checkpoint import why_damaged

pytestmark = pytest.mark.skipif(not shutil.which("pkill"), reason="the batch files need pkill")
PROGRAMS = ROOT / "tests" / "programs" / "slurm"
JOB_ID = str(os.getpid())
OPTIONS = ["--max_steps", 400, "--global_batch_size", 8]


class Cluster:
    """Runs a batch file as Slurm would run it. The jobs share a folder."""

    def __init__(self, folder, dataset_dir):
        self.folder = folder
        self.run = folder / "run"
        self.options = [*default_arguments(dataset_dir, self.run, TINY), *OPTIONS, "--save_steps", "40"]

    def submit(self, file, step):
        """Return a job that has made a step."""
        variables = {"SLURM_JOB_ID": JOB_ID, "SLURM_STAND_IN": str(self.folder), "PYTHON": sys.executable}
        job = subprocess.Popen(
            ["bash", PROGRAMS / "sbatch", ROOT / "scripts" / "slurm" / file, *map(str, self.options)],
            cwd=ROOT,
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        given_up_at = time.monotonic() + 120
        while last_step(self.run) < step:
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


def test_a_job_that_loses_a_machine_or_is_preempted_is_queued_again_and_stays_one_run(tmp_path, dataset_dir):
    """The machine that is left ends at once, with one sentence; the job had saved. On notice, a job saves first.

    The job file lets the launchers wait 600 seconds instead of 30.
    """
    cluster = Cluster(tmp_path, dataset_dir)
    job = cluster.submit("multi_node.sbatch", 50)
    below = psutil.Process(job.pid).children(recursive=True)
    (launcher,) = (process for process in below if "--machine_rank 1" in " ".join(process.cmdline()))
    for process in (*launcher.children(recursive=True), launcher):
        process.kill()
    output = job.communicate(timeout=60)[0]
    assert job.returncode == 75
    assert "error: " in output
    assert 'recipe/train.py", line' not in output
    assert len(cluster.list_requeued()) == 1

    job = cluster.submit("multi_node.sbatch", 120)
    output = cluster.preempt(job)
    assert job.returncode == 75, output
    assert cluster.list_requeued() == 2 * [f"requeue {JOB_ID}"]
    assert output.count("the launcher gives 600 seconds") == 2
    assert "checkpoint-40" in output  # the newest before the kill
    steps = list_steps(cluster.run)
    assert steps == list(range(1, steps[-1] + 1))
    assert why_damaged(cluster.run / f"checkpoint-{steps[-1]}") is None
    assert [start["num_processes"] for start in read_events(cluster.run, "start")] == [2, 2]


def test_a_job_that_branches_continues_its_own_run_when_it_is_queued_again(tmp_path, dataset_dir, train):
    """Not the checkpoint that it names. On one device, where `accelerate launch` is no torchrun, however the option of
    the folder is spelled; without GPUs, the job trains on the CPU.
    """
    start = train(*OPTIONS, "--max_steps", 5, "--save_steps", 3, output_dir=tmp_path / "base") / "checkpoint-3"
    cluster = Cluster(tmp_path, dataset_dir)
    where = cluster.options.index("--output_dir")
    cluster.options[where : where + 2] = [f"--output-dir={cluster.run}"]
    cluster.options += ["--resume_from_checkpoint", str(start)]
    for number, step in enumerate((10, 50), start=1):
        job = cluster.submit("single_node.sbatch", step)
        output = cluster.preempt(job)
        assert job.returncode == 75, output
        assert "--config_file accelerate_configs/cpu.yaml --num_processes 1 " in output
        assert len(cluster.list_requeued()) == number
    steps = list_steps(cluster.run)
    assert steps == list(range(4, steps[-1] + 1))
    assert not list(ROOT.glob(".resumable*"))
