"""Which answers to `accelerate config` this recipe cannot follow, and why.

`accelerate launch` passes the answers on in environment variables (accelerate 1.15, utils/launch.py).
"""

from collections.abc import Mapping

import torch
from accelerate.utils import is_pynvml_available, is_torch_xla_available, str_to_bool

from recipe.errors import UserError

MPI_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
FITS = (
    "each size of GPT-2 fits on one device with --activation_checkpointing; use "
    "accelerate_configs/multi_gpu.yaml, or multi_node.yaml for several machines"
)
REFUSED_SWITCHES = {
    "ACCELERATE_USE_DEEPSPEED": f"DeepSpeed is not supported, because {FITS}",
    "ACCELERATE_USE_FSDP": f"FSDP is not supported, because {FITS}",
    "ACCELERATE_USE_MEGATRON_LM": f"Megatron-LM is not supported, because {FITS}",
    "ACCELERATE_USE_PARALLELISM_CONFIG": f"parallelism_config is not supported, because {FITS}",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "dynamo_use_dynamic is not supported, because all batches have one shape; "
    "answer no, or use accelerate_configs/single_gpu.yaml",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "dynamo_use_regional_compilation is not supported, because the "
    "model is compiled as one graph; answer no, or use accelerate_configs/single_gpu.yaml",
}


def check_launcher(environment: Mapping[str, str]) -> None:
    """Raise `UserError` for what the launcher asks for and the run could only ignore or fail at.

    Precision and compilation are checked where they are chosen (recipe/hardware/choices.py).
    """
    for name, message in REFUSED_SWITCHES.items():
        if str_to_bool(environment.get(name, "false")):
            raise UserError(message)
    if environment.get("ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE", "NO") != "NO":
        raise UserError("SageMaker's own parallelism is not supported; use its distributed type NO, or several GPUs")
    if is_torch_xla_available():
        raise UserError(
            "TPUs are not supported, and Accelerate uses PyTorch/XLA wherever it is installed; run pip uninstall "
            "torch_xla, and use accelerate_configs/single_gpu.yaml or cpu.yaml"
        )
    pins_cpus = str_to_bool(environment.get("ACCELERATE_CPU_AFFINITY", "false"))
    if pins_cpus and torch.cuda.is_available() and not is_pynvml_available():
        raise UserError("enable_cpu_affinity requires nvidia-ml-py; run pip install nvidia-ml-py, or answer no")
    # Accelerate's launcher sets MASTER_ADDR for several processes, also where it starts only one.
    one_process = not {"LOCAL_RANK", *MPI_SIZES} & environment.keys()
    if one_process and {"ACCELERATE_DYNAMO_BACKEND", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        raise UserError(
            "accelerate launch was told to start several processes but started one, as it does with --cpu, and for "
            "MULTI_CPU without mpirun; use accelerate_configs/multi_cpu.yaml, for several machines with "
            "--num_machines and --machine_rank (or unset MASTER_ADDR, to run one process)"
        )


def wants_cpu(environment: Mapping[str, str]) -> bool:
    """Return whether the launcher asks for the CPU: by `use_cpu`, or by hiding all GPUs from several processes.

    The launcher of several processes does not pass `use_cpu` on, but it does pass on gpu_ids -1 (accelerate 1.15).
    """
    hidden = set(environment.get("CUDA_VISIBLE_DEVICES", "all").split(",")) == {"-1"}
    return bool(str_to_bool(environment.get("ACCELERATE_USE_CPU", "false"))) or hidden
