"""torchtitan: a Python module whose function returns the Trainer.Config of the plan.

Source: torchtitan 0.3.0 (PyPI): config/manager.py (`--module`, `--config`), config/configs.py,
trainer.py, distributed/fsdp.py, distributed/pipeline_parallel.py, components/loss.py,
models/llama3, models/qwen3.
"""

from __future__ import annotations

from fsdpplan.emit.doors.launch_lines import (
    commented,
    environment_lines,
    rendezvous_port,
    torchrun_words,
)
from fsdpplan.emit.doors.torchtitan_model import model_lines
from fsdpplan.emit.doors.trainer_words import Recipe, own_program, recipe_of, stage_ranges
from fsdpplan.emit.doors.words import require_sayable
from fsdpplan.emit.order import Order, refuse_others
from fsdpplan.emit.safe_text import comment, shell_word
from fsdpplan.emit.segments import by_hand_lines
from fsdpplan.emit.slurm.header import header_lines
from fsdpplan.emit.trainer_program import Trainer
from fsdpplan.spec.plan import Plan
from fsdpplan.spec.programs.torchtitan import SCHEDULES, TORCHTITAN
from fsdpplan.spec.trainer_options import SEED

MODULE = "fsdpplan_torchtitan"
"""Name of the file, without `.py`, in the lines that start it."""

_JOB = frozenset({"program", "env", "env_setup", "python", "port", "nccl_debug"})
_TRAINER = frozenset(
    {
        "steps",
        "learning_rate",
        "lr_schedule",
        "min_lr",
        "warmup_steps",
        "decay_steps",
        "clip_norm",
        "adam_beta1",
        "adam_beta2",
        "adam_eps",
        "seed",
        "checkpoint_dir",
        "checkpoint_every",
        "checkpoint_keep",
    }
)


def render(order: Order) -> str:
    """The module. Raises SpecError for what torchtitan has no word for."""
    refuse_others(order, target="torchtitan", job=_JOB, pods=frozenset())
    program = own_program(order, target="torchtitan", known=_TRAINER)
    require_sayable(order, target="torchtitan", vocabulary=TORCHTITAN)
    sections = [
        [
            *header_lines(plan=order.plan, plan_json=order.plan_json, version=order.version),
            *_usage(order),
        ],
        ['"""The plan as a configuration of torchtitan 0.3.0."""'],
        _imports(order.plan),
        _places(),
        model_lines(order.plan),
        _config(order, program),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def _usage(order: Order) -> list[str]:
    nodes = order.plan.cluster.nodes
    module = f"-m torchtitan.train --module {MODULE} --config train"
    names = [
        "HEAD_NODE=the first node's address NODE_RANK=0, 1, ... of this node "
        f"PORT={rendezvous_port(order)}"
    ]
    start = (
        f"PYTHONPATH=. {shell_word(order.job.python)} -m torch.distributed.run "
        f"{torchrun_words(order.plan)} {module}"
    )
    return [
        "#",
        "# For torchtitan 0.3.0 (pip install torchtitan==0.3.0), whose fields and functions it",
        "# names: 0.2.2 and older have other ones, and so has the main branch since (batches are",
        "# counted in tokens there).",
        comment(f"Save it as {MODULE}.py, and type on {'each node' if nodes > 1 else 'the node'}:"),
        *commented(environment_lines(order)),
        *(commented(names) if nodes > 1 else []),
        *commented([start]),
        *by_hand_lines(order.plan),
        "# The prediction is for the reference trainer; torchtitan's attention masks documents",
        "# (FlexAttention), its data are its own, and its AdamW decays vectors, too.",
    ]


def _imports(plan: Plan) -> list[str]:
    family = "Qwen3" if plan.model.qk_norm else "Llama3"
    package = f"torchtitan.models.{family.lower()}"
    chunked = plan.layout.loss_chunks > 1
    fp8 = plan.training.precision == "fp8"
    policy = {"full": "FullAC", "op": "SelectiveAC"}.get(plan.layout.activation_checkpointing)
    loss = "ChunkedLossWrapper, CrossEntropyLoss" if chunked else "CrossEntropyLoss"
    policy_line = f"from torchtitan.distributed.activation_checkpoint import {policy}"
    return [
        "from functools import partial",
        "",
        "from torch import nn",
        "from torchtitan.components.checkpoint import CheckpointManager",
        f"from torchtitan.components.loss import {loss}",
        "from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw",
        *(["from torchtitan.components.quantization import Float8LinearConverter"] if fp8 else []),
        "from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, "
        "TrainingConfig",
        *([] if policy is None else [policy_line]),
        "from torchtitan.distributed.pipeline_parallel import pipeline_llm",
        "from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader",
        "from torchtitan.models.common import Embedding, Linear, RMSNorm",
        f"from torchtitan.models.common import {_rope(plan)}",
        "from torchtitan.models.common.config_utils import get_attention_config",
        "from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config",
        "from torchtitan.models.common.param_init import depth_scaled_std, skip_param_init",
        f"from {package} import {family}Model",
        f"from {package}.model import {family}TransformerBlock",
        f"from {package}.parallelize import parallelize_{_function(family)}",
        f"from {package}.state_dict_adapter import {family}StateDictAdapter",
        "from torchtitan.protocols.model_spec import ModelSpec",
        "from torchtitan.trainer import Trainer",
    ]


def _rope(plan: Plan) -> str:
    return "CosSinRoPE" if plan.model.qk_norm else "ComplexRoPE"


def _function(family: str) -> str:
    return "llama" if family == "Llama3" else "qwen3"


def _places() -> list[str]:
    return [
        "# What a plan does not say: the tokenizer's folder, and the text.",
        'HF_ASSETS_PATH = "./assets/hf"',
        'DATASET = "c4"',
    ]


def _config(order: Order, program: Trainer) -> list[str]:
    plan, recipe = order.plan, recipe_of(order, program)
    seed = SEED if program.seed is None else program.seed
    return [
        "",
        "def train() -> Trainer.Config:",
        "    spec = model_spec()",
        "    return Trainer.Config(",
        "        model_spec=spec,",
        "        hf_assets_path=HF_ASSETS_PATH,",
        "        dataloader=HuggingFaceTextDataLoader.Config(dataset=DATASET),",
        f"        loss={_loss(plan)},",
        f"        optimizer=default_adamw(lr={recipe.learning_rate!r}, betas={recipe.betas!r}, "
        f"eps={recipe.eps!r}),",
        *_schedule(recipe),
        *_training(plan, recipe),
        *_parallelism(plan),
        *_checkpoint(program),
        f"        activation_checkpoint={_recomputation(plan)},",
        *_compile(plan),
        f"        debug=DebugConfig(seed={seed}),",
        "    )",
    ]


def _loss(plan: Plan) -> str:
    rows = plan.model.vocab_rows(plan.layout.tp)
    whole = f"CrossEntropyLoss.Config(global_vocab_size={rows})"
    if plan.layout.loss_chunks == 1:
        return whole
    return f"ChunkedLossWrapper.Config(num_chunks={plan.layout.loss_chunks}, loss_fn={whole})"


def _schedule(recipe: Recipe) -> list[str]:
    """Of its decay the last steps are a share: of wsd's those, of a constant rate none; the others
    decay from the end of the warm-up on. Source: components/optimizer/lr_scheduler.py."""
    kind = {"cosine": "cosine", "linear": "linear", "wsd": "sqrt", "constant": "linear"}
    share = {"wsd": recipe.decay_steps / recipe.steps, "constant": 0.0}.get(recipe.lr_schedule)
    return [
        "        lr_scheduler=LRSchedulersContainer.Config(",
        f"            warmup_steps={recipe.warmup_steps},",
        f"            decay_ratio={share!r},",
        f"            decay_type={kind[recipe.lr_schedule]!r},",
        f"            min_lr_factor={recipe.floor_fraction:.12g},",
        "        ),",
    ]


def _training(plan: Plan, recipe: Recipe) -> list[str]:
    layout = plan.layout
    batch = layout.micro_batch * (layout.num_microbatches if layout.pp > 1 else 1)
    compute = "float32" if plan.training.precision == "fp32" else "bfloat16"
    return [
        "        training=TrainingConfig(",
        f"            local_batch_size={batch},",
        f"            global_batch_size={plan.training.global_batch},",
        f"            seq_len={plan.training.seq_len},",
        f"            steps={recipe.steps},",
        f"            max_norm={recipe.clip_norm!r},",
        *(['            dtype="bfloat16",'] if plan.training.param_dtype == "bf16" else []),
        f"            mixed_precision_param={compute!r},",
        '            mixed_precision_reduce="float32",',
        f"            enable_cpu_offload={layout.offload == 'cpu'},",
        "            # The plan prices launches one by one.",
        "            disable_cuda_graphs=True,",
        "        ),",
    ]


def _parallelism(plan: Plan) -> list[str]:
    layout = plan.layout
    lines = [
        f"data_parallel_replicate_degree={layout.dp_replicate},",
        f"data_parallel_shard_degree={layout.dp_shard},",
        f"fsdp_reshard_after_forward={layout.reshard_after_forward!r},",
        f"tensor_parallel_degree={layout.tp},",
        f"enable_sequence_parallel={layout.sequence_parallel},",
        f"context_parallel_degree={layout.cp},",
        f"pipeline_parallel_degree={layout.pp},",
    ]
    if layout.pp > 1:
        lines += [
            f"pipeline_parallel_schedule={SCHEDULES[layout.schedule]!r},",
            f"pipeline_parallel_microbatch_size={layout.micro_batch},",
            "module_fqns_per_model_part=[",
            *(f"    {part!r}," for part in _parts(plan)),
            "],",
        ]
    return [
        "        parallelism=ParallelismConfig(",
        *(f"            {line}" for line in lines),
        "        ),",
    ]


def _parts(plan: Plan) -> list[list[str]]:
    """Names of the modules of each stage."""
    parts = [[f"layers.{block}" for block in blocks] for blocks in stage_ranges(plan.layout)]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "lm_head"]
    return parts


def _checkpoint(program: Trainer) -> list[str]:
    if program.checkpoint_dir is None:
        return ["        checkpoint=CheckpointManager.Config(enable=False),"]
    lines = [
        "enable=True,",
        f"folder={program.checkpoint_dir!r},",
        f"keep_latest_k={program.checkpoint_keep or 2},",
        "last_save_model_only=False,",
    ]
    if program.checkpoint_every is not None:
        lines.append(f"interval={program.checkpoint_every},")
    return [
        "        checkpoint=CheckpointManager.Config(",
        *(f"            {line}" for line in lines),
        "        ),",
    ]


def _recomputation(plan: Plan) -> str:
    policies = {"full": "FullAC.Config()", "op": "SelectiveAC.Config()"}
    return policies.get(plan.layout.activation_checkpointing, "None")


def _compile(plan: Plan) -> list[str]:
    layout = plan.layout
    return [
        "        compile=CompileConfig(",
        f"            enable={layout.compile},",
        '            components=["model"],',
        f"            enable_async_tensor_parallel={layout.async_tp},",
        "        ),",
    ]
