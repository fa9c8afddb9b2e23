"""Hugging Face Accelerate: the YAML file that `accelerate launch --config_file` reads.

Source: accelerate 1.15.0 (PyPI): commands/config/config_args.py (keys, unknown ones refused),
commands/launch.py; what it cannot run is in spec/programs/accelerate.py.
"""

from __future__ import annotations

from fsdpplan.emit.doors.launch_lines import commented, environment_lines, rendezvous_port
from fsdpplan.emit.doors.words import require_sayable
from fsdpplan.emit.order import Order, differing, refuse_others
from fsdpplan.emit.safe_text import comment, shell_word, shell_words
from fsdpplan.emit.segments import by_hand_lines
from fsdpplan.emit.slurm.header import header_lines
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.emit.yaml_text import YamlValue, yaml_text
from fsdpplan.errors import SpecError
from fsdpplan.spec.plan import Plan
from fsdpplan.spec.programs.accelerate import ACCELERATE

_JOB = frozenset({"program", "env", "env_setup", "python", "port", "nccl_debug"})


def render(order: Order) -> str:
    """The file. Raises SpecError for what Accelerate has no word for."""
    refuse_others(order, target="accelerate", job=_JOB, pods=frozenset())
    require_sayable(order, target="accelerate", vocabulary=ACCELERATE)
    head = [
        *header_lines(plan=order.plan, plan_json=order.plan_json, version=order.version),
        *_usage(order),
        *_script_part(order.plan),
    ]
    return "\n".join(head) + "\n" + yaml_text(configuration(order.plan))


def configuration(plan: Plan) -> dict[str, YamlValue]:
    """Keys of the file and their values."""
    training, cluster = plan.training, plan.cluster
    sharded = plan.layout.sharding == "fsdp"
    alone = "MULTI_GPU" if cluster.gpus > 1 else "NO"
    found: dict[str, YamlValue] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if sharded else alone,
        "mixed_precision": "no" if training.precision == "fp32" else training.precision,
        "num_machines": cluster.nodes,
        "num_processes": cluster.gpus,
        "machine_rank": 0,
        "same_network": True,
        "rdzv_backend": "static",
        "main_training_function": "main",
        "use_cpu": False,
        "debug": False,
    }
    if sharded:
        found["fsdp_config"] = _fsdp(plan)
        found["parallelism_config"] = _degrees(plan)
    if plan.layout.compile:
        found["dynamo_config"] = {
            "dynamo_backend": "INDUCTOR",
            "dynamo_mode": "default",
            "dynamo_use_dynamic": False,
            "dynamo_use_fullgraph": False,
            "dynamo_use_regional_compilation": True,
        }
    return found


def _fsdp(plan: Plan) -> dict[str, YamlValue]:
    layout = plan.layout
    return {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": layout.reshard_after_forward == "always",
        "fsdp_offload_params": layout.offload == "cpu",
        "fsdp_activation_checkpointing": layout.activation_checkpointing == "full",
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }


def _degrees(plan: Plan) -> dict[str, YamlValue]:
    layout = plan.layout
    found: dict[str, YamlValue] = {
        f"parallelism_config_{name}_size": getattr(layout, name)
        for name in ("dp_replicate", "dp_shard", "tp", "cp")
    }
    if layout.cp > 1:
        found["parallelism_config_cp_comm_strategy"] = "allgather"
    return found


def _usage(order: Order) -> list[str]:
    plan = order.plan
    several = plan.cluster.nodes > 1
    start = [
        f"{shell_word(order.job.python)} -m accelerate.commands.launch --config_file THIS_FILE"
    ]
    if several:
        start.append(
            '--machine_rank "$NODE_RANK" --main_process_ip "$HEAD_NODE" '
            f"--main_process_port {rendezvous_port(order)}"
        )
    start.append(_program(order))
    return [
        "#",
        "# For accelerate 1.15.0: older ones have other keys, units and dtypes.",
        f"# Type on {'each node' if several else 'the node'}:",
        *commented([*environment_lines(order), " ".join(start)]),
        *by_hand_lines(plan),
    ]


def _program(order: Order) -> str:
    program = order.job.program
    if not isinstance(program, Trainer):
        return shell_words((program.script, *program.words()))
    if asked := differing(program, Trainer()):
        flags = ", ".join("--" + name.replace("_", "-") for name in asked)
        raise SpecError(
            f"{flags} is of the reference trainer, and Accelerate runs a script of yours: leave it "
            "out, and give --script train.py"
        )
    return "YOUR_SCRIPT.py"


def _script_part(plan: Plan) -> list[str]:
    """What Accelerate leaves to the script that it starts."""
    layout, training = plan.layout, plan.training
    each = layout.gradient_sync == "every" and layout.num_microbatches > 1
    lines = [
        "For the script, which Accelerate leaves these to:",
        f"  sequences of {training.seq_len} tokens, {layout.micro_batch} a batch of each process",
        f"  Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps="
        f"{layout.num_microbatches}, sync_each_batch={each}))",
        "  torch.optim.AdamW, fused",
    ]
    if training.steps is not None:
        lines.append(f"  {training.steps} steps")
    if layout.tp > 1:
        lines.append('  a model loaded with tp_plan="auto" on the mesh of the Accelerator')
    if training.precision == "bf16":
        lines.append("It runs the model under autocast and returns logits in fp32: what the")
        lines.append("prediction leaves out.")
    return ["#", *(comment(line) for line in lines)]
