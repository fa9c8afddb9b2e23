"""No option is accepted and ignored: each one changes what its command answers."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from fsdpplan.cli.app import app, exit_code_of
from fsdpplan.cli.resolve import job
from fsdpplan.emit.packed import unpacked
from fsdpplan.files.catalogue import load_model
from tests.cli.small import DEMO, SHAPE, answer, on_a_machine_without_gpus, words

STAND_INS = Path(__file__).resolve().parents[2] / "stand_ins"

HSDP = "estimate --model llama-3.2-1b --gpus 16 --hardware dgx-h100 --dp-shard 8"
SMALL = f"estimate {' '.join(SHAPE)} --gpus 8 --hardware dgx-h100 --dp-shard 8"
ONE_NODE = "estimate --model llama-3.2-1b --gpus 8 --hardware dgx-h100"
PIPELINE = f"{ONE_NODE} --dp-replicate 4 --pp 2 --global-batch 64"

MIXTURE = "estimate --model mixtral-8x7b --gpus 32 --hardware dgx-h100 --dp-shard 32"

PLANNING = {
    "--params": (SMALL.replace(" ".join(SHAPE), "--params 1e9"), ("--params", "2e9")),
    "--active-params": (
        SMALL.replace(" ".join(SHAPE), "--params 1e9"),
        ("--active-params", "200e6"),
    ),
    "--model": (HSDP, ("--model", "llama-3.2-3b")),
    "--config": (SMALL.replace(" ".join(SHAPE), "--params 1e9"), ()),
    "--layers": (SMALL, ("--layers", "9")),
    "--hidden": (SMALL, ("--hidden", "640")),
    "--ffn-hidden": (SMALL, ("--ffn-hidden", "1024")),
    "--heads": (SMALL, ("--heads", "10")),
    "--kv-heads": (SMALL, ("--kv-heads", "1")),
    "--vocab": (SMALL, ("--vocab", "512")),
    "--vocab-multiple": (SMALL, ("--vocab-multiple", "300")),
    "--gpus": (HSDP, ("--gpus", "32")),
    "--hardware": (HSDP, ("--hardware", "dgx-h200")),
    "--gpus-per-node": (HSDP, ("--gpus-per-node", "4")),
    "--gpu": (HSDP, ("--gpu", "h200-sxm-141g")),
    "--intra-bw": (HSDP, ("--intra-bw", "100GB/s")),
    "--inter-bw": (HSDP, ("--inter-bw", "10Gb/s")),
    "--seq-len": (HSDP, ("--seq-len", "8192")),
    "--global-batch": (HSDP, ("--global-batch", "64")),
    "--precision": (HSDP, ("--precision", "fp32")),
    "--reduce-dtype": (HSDP, ("--reduce-dtype", "bf16")),
    "--precision-switch": (HSDP, ("--precision-switch", "fp8@80%")),
    "--param-dtype": (HSDP, ("--param-dtype", "bf16")),
    "--gradient-compression": (
        f"{ONE_NODE} --dp-replicate 8 --sharding ddp",
        ("--gradient-compression", "powersgd:4"),
    ),
    "--dropout": (HSDP, ("--dropout", "0.1")),
    "--headroom": (HSDP, ("--headroom", "30%")),
    "--fits": (HSDP, ("--fits", "99.99%")),
    "--dp-replicate": (f"{ONE_NODE} --dp-shard 8", ("--dp-replicate", "2", "--dp-shard", "4")),
    "--dp-shard": (f"{ONE_NODE} --dp-replicate 2", ("--dp-replicate", "4", "--dp-shard", "2")),
    "--tp": (HSDP, ("--tp", "2")),
    "--pp": (f"{ONE_NODE} --dp-replicate 8", ("--pp", "2", "--dp-replicate", "4")),
    "--micro-batch": (HSDP, ("--micro-batch", "2")),
    "--schedule": (
        f"{PIPELINE} --activation-checkpointing full --global-batch 32",
        ("--schedule", "gpipe"),
    ),
    "--virtual-stages": (PIPELINE, ("--virtual-stages", "2")),
    "--sharding": (f"{ONE_NODE} --dp-shard 8", ("--sharding", "ddp")),
    "--reshard-after-forward": (HSDP, ("--reshard-after-forward", "never")),
    "--gradient-sync": (HSDP, ("--gradient-sync", "last")),
    "--activation-checkpointing": (HSDP, ("--activation-checkpointing", "full")),
    "--compile": (HSDP, ("--no-compile",)),
    "--tokens": (HSDP, ("--tokens", "1T")),
    "--goodput": (HSDP, ("--goodput",)),
    "--mtbf-gpu": (f"{HSDP} --goodput", ("--mtbf-gpu", "30000h")),
    "--mtbf-node": (f"{HSDP} --goodput", ("--mtbf-node", "1y")),
    "--storage-bw": (f"{HSDP} --goodput", ("--storage-bw", "3GB/s")),
    "--restart": (f"{HSDP} --goodput", ("--restart", "20min")),
    "--requeue": (f"{HSDP} --goodput", ("--requeue", "5min")),
    "--checkpoint-every": (f"{HSDP} --goodput", ("--checkpoint-every", "77")),
    "--checkpoint-async": (f"{HSDP} --goodput", ("--no-checkpoint-async",)),
    "--runtime": (HSDP, ("--runtime", "fsdp1")),
    "--optimizer": (HSDP, ("--optimizer", "muon")),
    "--fp8-recipe": (f"{HSDP} --precision fp8", ("--fp8-recipe", "rowwise")),
    "--fp8-all-gather": (f"{HSDP} --precision fp8", ("--fp8-all-gather",)),
    "--mean-document-tokens": (f"{HSDP} --pack", ("--mean-document-tokens", "100")),
    "--cp": (f"{ONE_NODE} --dp-replicate 2", ("--cp", "2")),
    "--cp-attention": (f"{ONE_NODE} --dp-replicate 2 --cp 4", ("--cp-attention", "ring")),
    "--ep": (f"{MIXTURE} --activation-checkpointing full", ("--ep", "8")),
    "--async-tp": (f"{HSDP} --tp 2", ("--async-tp",)),
    "--offload": (HSDP, ("--offload", "cpu")),
    "--wrap-blocks": (HSDP, ("--wrap-blocks", "2")),
    "--loss-chunks": (HSDP, ("--loss-chunks", "8")),
    "--ddp-bucket": (f"{ONE_NODE} --dp-replicate 8", ("--ddp-bucket", "100MiB")),
}
"""Option -> (a command, what changes its answer)."""


def replaced(base: tuple[str, ...], change: tuple[str, ...]) -> tuple[str, ...]:
    """`base` with the options of `change` in place of its own."""
    kept = list(base)
    for flag in (word for word in change if word.startswith("--") and word in kept):
        index = kept.index(flag)
        del kept[index : index + 2]
    if "--sharding" in change:
        index = kept.index("--dp-shard")
        del kept[index : index + 2]
    return (*kept, *change)


@pytest.mark.sampled(30)
@pytest.mark.parametrize("flag", PLANNING)
def test_an_option_of_planning_changes_the_estimate(
    flag: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    base, change = PLANNING[flag]
    given = words(base)
    if flag == "--config":
        config = tmp_path / "config.json"
        config.write_text(json.dumps(CONFIG))
        change = ("--config", str(config))
        given = tuple(word for word in given if word not in ("--params", "1e9"))
        before = answer(capsys, *given, "--params", "1e9")
    else:
        before = answer(capsys, *given)
    after = answer(capsys, *replaced(given, change))
    said = ("assumptions", "sources")
    assert {k: v for k, v in before.items() if k not in said} != {
        k: v for k, v in after.items() if k not in said
    }


CONFIG = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 1000,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}


SEARCH = words("recommend --model llama-3.2-1b --gpus 4 --hardware dgx-h100 --global-batch 64")
PINS = {
    "dp_replicate": 2,
    "dp_shard": 2,
    "cp": 1,
    "tp": 2,
    "pp": 2,
    "ep": 1,
    "micro_batch": 4,
    "virtual_stages": 2,
    "sharding": "fsdp",
    "reshard_after_forward": "never",
    "gradient_sync": "last",
    "activation_checkpointing": "op",
    "checkpoint_blocks": 3,
    "compile": False,
    "async_tp": True,
    "offload": "cpu",
    "wrap_blocks": 2,
    "loss_chunks": 4,
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("pin", PINS)
def test_a_pin_is_kept_by_every_layout(
    pin: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    value = PINS[pin]
    flag = "--" + pin.replace("_", "-")
    no_value = {False: ("--no-compile",), True: (flag,)}
    pinned = no_value[value] if isinstance(value, bool) else (flag, str(value))
    plans = answer(capsys, *SEARCH, *pinned, "--save", str(tmp_path / "plan.json"))["plans"]
    assert plans
    assert {json.dumps(plan["layout"][pin]) for plan in plans} == {json.dumps(value)}


def test_experts_over_tp_is_kept_by_every_layout(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = words("recommend --model mixtral-8x7b --gpus 16 --hardware dgx-h100 --global-batch 64")
    given = (*given, "--runtime", "megatron", "--tp", "4", "--sharding", "zero1")
    plans = answer(capsys, *given, "--experts-over-tp", "--save", str(tmp_path / "plan.json"))
    layouts = [plan["layout"] for plan in plans["plans"]]
    assert layouts
    assert {layout["experts_over_tp"] for layout in layouts} == {True}
    assert {layout["ep"] * layout["tp"] for layout in layouts} <= {4, 8}


def test_a_pinned_bucket_is_kept_by_every_layout(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = (*SEARCH, "--ddp-bucket", "50MiB", "--save", str(tmp_path / "plan.json"))
    plans = answer(capsys, *given)["plans"]
    assert {plan["layout"]["ddp_bucket_bytes"] for plan in plans} == {50 * 2**20}
    assert {plan["layout"]["sharding"] for plan in plans} == {"ddp"}


@pytest.mark.parametrize(
    "schedule",
    [
        "gpipe",
        "1f1b",
        "interleaved_1f1b",
        "looped_bfs",
        "interleaved_zero_bubble",
        "zbv",
        "dualpipev",
    ],
)
def test_a_pinned_schedule_means_a_pipeline(
    schedule: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    # few sequences: GPipe holds the logits of every micro-batch
    given = words("recommend --model llama-3.2-1b --gpus 4 --hardware dgx-h100 --global-batch 8")
    given = (*given, "--schedule", schedule, "--save", str(tmp_path / "plan.json"))
    for plan in answer(capsys, *given)["plans"]:
        assert plan["layout"]["schedule"] == schedule
        assert plan["layout"]["pp"] > 1


JOB = {
    "--job-name": "llama",
    "--time": "08:00:00",
    "--partition": "gpu",
    "--account": "lab",
    "--qos": "high",
    "--output": "logs/%j.out",
    "--cpus-per-task": "7",
    "--reservation": "maintenance",
    "--constraint": "h100",
    "--exclude": "n03",
    "--sbatch": "--constraint=h100",
    "--env-setup": "module load cuda",
    "--python": "/opt/venv/bin/python",
    "--port": "29511",
    "--container": "pytorch.sqsh",
    "--metrics": "run.jsonl",
    "--steps": "77",
    "--data": "tokens.bin",
    "--init-from": "published-model",
    "--export-hf": "trained-model",
    "--learning-rate": "0.00031",
    "--warmup-steps": "123",
    "--lr-schedule": "linear",
    "--min-lr": "1.23e-05",
    "--adam-beta1": "0.87",
    "--adam-beta2": "0.987",
    "--adam-eps": "1.5e-07",
    "--param-group": "norm*:weight_decay=0.3",
    "--weight-decay": "0.023",
    "--clip-norm": "0.7",
    "--adamw": "foreach",
    "--eval-data": "held.jsonl",
    "--seed": "4321",
    "--checkpoint-dir": "saved",
    "--log-every": "13",
    "--gc-every": "137",
    "--on-spike": "skip",
    "--tensorboard": "tensorboard-events",
    "--wandb": "llama-project",
    "--mlflow": "llama-experiment",
    "--memory-snapshot": "17:3",
    "--prometheus": "node/run.prom",
    "--profile": "10:3",
    "--hang-seconds": "345",
}
"""Option of a job -> a value that must stand in the script."""

TOGETHER = {
    "--env": ("--env 'NAME=some value'", "some value"),
    "--retries": ("--retries 5", "retries=5"),
    "--spares": ("--spares 2", "#SBATCH --no-kill"),
    "--requeue": ("--requeue", "#SBATCH --requeue"),
    "--preflight": ("--no-preflight", "start_ranks"),
    "--container-mount": ("--container i.sqsh --container-mount /d:/e", "/d:/e"),
    "--container-runtime": (
        "--container i.sif --container-runtime apptainer",
        "apptainer exec",
    ),
    "--signal-seconds": ("--signal-seconds 90 --time 08:00:00", "90"),
    "--checkpoint-every": ("--checkpoint-every 55 --checkpoint-dir saved", "55"),
    "--checkpoint-keep": ("--checkpoint-keep 7 --checkpoint-dir saved", "--checkpoint-keep=7"),
    "--checkpoint-async": (
        "--no-checkpoint-async --checkpoint-dir saved",
        "--no-checkpoint-async",
    ),
    "--profile-stacks": ("--profile 10:3 --profile-stacks", "--profile-stacks"),
    "--script": ("--script train.py", "train.py"),
    "--tokenizer": ("--data text.jsonl --tokenizer tokenizer.json", "--tokenizer=tokenizer.json"),
    "--data-workers": ("--data text.jsonl --data-workers 3", "--data-workers=3"),
    "--prefetch": ("--data text.jsonl --prefetch 5", "--prefetch=5"),
    "--pack": ("--pack", "--pack"),
    "--sft": ("--data c.jsonl --tokenizer t.json --sft", "--sft"),
    "--chat-template": (
        "--data c.jsonl --tokenizer t.json --sft --chat-template own.jinja",
        "--chat-template=own.jinja",
    ),
    "--eval-every": ("--eval-data held.jsonl --eval-every 66", "--eval-every=66"),
    "--eval-tokens": ("--eval-data held.jsonl --eval-tokens 5000", "--eval-tokens=5000"),
    "--decay-steps": ("--lr-schedule wsd --decay-steps 17 --steps 90", "--decay-steps=17"),
    "--allow-changes": ("--allow-changes --checkpoint-dir saved", "--allow-changes"),
    "--numbers": ("--no-numbers", "--no-numbers"),
    "--args": ("--script train.py --args '--lr 1e-4 --name \"a b\"'", "a b"),
}
"""The same for options that need another."""

PODS = {
    "--image": ("--image registry/another", "registry/another"),
    "--namespace": ("--namespace team-a", "namespace: team-a"),
    "--queue": ("--queue gpus", "kueue.x-k8s.io/queue-name: gpus"),
    "--volumes": ("--volumes claim:/ckpt", "claimName: claim"),
    "--rdma": ("--rdma rdma/ib=8", 'rdma/ib: "8"'),
    "--topology": ("--topology a.b/rack --queue q", "podset-required-topology: a.b/rack"),
    "--topology-mode": (
        "--topology a.b/rack --queue q --topology-mode preferred",
        "podset-preferred-topology",
    ),
    "--secret-env": ("--secret-env HF_TOKEN=hub:token", "secretKeyRef"),
    "--memory": ("--memory 512Gi", '"512Gi"'),
    "--shm-size": ("--shm-size 64Gi", '"64Gi"'),
    "--service-account": ("--service-account me", "serviceAccountName: me"),
    "--priority-class": ("--priority-class high", "priorityClassName: high"),
    "--pull-secret": ("--pull-secret registry", "imagePullSecrets"),
    "--node-selector": ("--node-selector gpu=h100", "gpu: h100"),
    "--toleration": ("--toleration nvidia.com/gpu", "key: nvidia.com/gpu"),
    "--annotation": ("--annotation a.b/c=d", "a.b/c: d"),
    "--host-network": ("--host-network", "hostNetwork: true"),
    "--grace-seconds": ("--grace-seconds 77", "terminationGracePeriodSeconds: 77"),
}
"""The same for the pods of a manifest."""


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a saved plan, and the shell in it."""
    on_a_machine_without_gpus(monkeypatch)
    monkeypatch.syspath_prepend(STAND_INS)  # for dashboards
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    assert exit_code_of(DEMO) == 0
    return tmp_path


@pytest.mark.parametrize("command", ["emit-launch", "run --dry-run"])
def test_each_option_of_a_job_reaches_the_script(
    command: str, plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = {flag: ((f"{flag}={value}",), value) for flag, value in JOB.items()}
    cases |= {flag: (words(text), value) for flag, (text, value) in TOGETHER.items()}
    bare = answer(capsys, *words(command))["script"]
    for flag, (given, value) in cases.items():
        data = any(word.split("=")[0] == "--data" for word in given)
        far = ["--steps=31"] if data else []  # data has to be told how far
        script = answer(capsys, *words(command), *given, *far)["script"]
        assert script != bare, flag
        assert value in script, flag


OF_SOME_PLANS = {
    "--muon-learning-rate": ("--muon-learning-rate 0.02", "--muon-learning-rate=0.02"),
    "--muon-weight-decay": ("--muon-weight-decay 0.03", "--muon-weight-decay=0.03"),
    "--muon-momentum": ("--muon-momentum 0.9", "--muon-momentum=0.9"),
    "--muon-nesterov": ("--no-muon-nesterov", "--no-muon-nesterov"),
    "--muon-ns-steps": ("--muon-ns-steps 6", "--muon-ns-steps=6"),
    "--expert-bias-rate": ("--expert-bias-rate 0", "--expert-bias-rate=0.0"),
    "--router-aux-loss-coef": ("--router-aux-loss-coef 0.5", "--router-aux-loss-coef=0.5"),
}


def test_options_of_muon_and_experts_reach_scripts_of_plans_that_have_them(
    plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for given, _ in OF_SOME_PLANS.values():
        assert exit_code_of(["emit-launch", *words(given)]) == 2, given
    document = json.loads((plan / "fsdpplan.json").read_text())
    document["training"]["optimizer"] = "muon"
    document["model"]["experts"] = {"experts": 4, "active": 2, "hidden": 8}
    (plan / "fsdpplan.json").write_text(json.dumps(document))
    capsys.readouterr()
    for given, value in OF_SOME_PLANS.values():
        assert value in answer(capsys, "emit-launch", *words(given))["script"]


def test_a_pattern_that_matches_no_parameter_is_refused_before_the_queue(
    plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(["emit-launch", "--param-group", "embed*:lr=0.1"]) == 2
    assert "tok_embeddings.weight" in capsys.readouterr().err


def test_a_host_without_torch_emits_what_the_trainer_will_check(
    plan: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fsdpplan.cli.resolve.job.find_spec", lambda name: None)
    assert exit_code_of(["emit-launch", "--param-group", "embed*:lr=0.1"]) == 0
    assert "--param-group" in capsys.readouterr().out


@pytest.mark.parametrize("is_sigmoid", [False, True])
@pytest.mark.parametrize("rate", ["", "--expert-bias-rate 0", "--expert-bias-rate 0.001"])
def test_an_export_without_the_biases_that_routed_is_refused_before_the_queue(
    is_sigmoid: bool, rate: str, plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the trainer refuses it: DeepSeek-V3's format has them, a softmax router's has not."""
    from fsdpplan.trainer.config import parse_plan
    from fsdpplan.trainer.errors import TrainerError
    from fsdpplan.trainer.huggingface.export import what_to_publish
    from fsdpplan.trainer.options import parse_options

    name = "deepseek-v3" if is_sigmoid else "mixtral-8x7b"
    document = json.loads((plan / "fsdpplan.json").read_text())
    document["model"] = asdict(load_model(name))
    (plan / "fsdpplan.json").write_text(json.dumps(document))
    words_given = ["--export-hf", "out", *words(rate)]
    options = parse_options(words_given)
    parsed = parse_plan(json.dumps(document))
    try:
        what_to_publish(parsed, options, options.recipe(parsed))
        refused = ""
    except TrainerError as error:
        refused = str(error)
    assert bool(refused) == (rate.endswith("0.001") and not is_sigmoid)
    assert exit_code_of(["emit-launch", *words_given]) == (2 if refused else 0)
    assert refused in capsys.readouterr().err


def test_a_model_that_nothing_would_load_is_refused_before_the_queue(
    plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads((plan / "fsdpplan.json").read_text())
    document["model"]["embedding_norm"] = True
    (plan / "fsdpplan.json").write_text(json.dumps(document))
    assert exit_code_of(["emit-launch", "--export-hf", "out"]) == 2
    assert "no published architecture" in capsys.readouterr().err


def test_a_checkpoint_that_cannot_go_on_is_refused_before_the_queue(
    plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = json.loads((plan / "fsdpplan.json").read_text())["training"]
    saved = plan / "saved"
    (saved / "step-00000050").mkdir(parents=True)
    (saved / "latest").write_text("step-00000050")
    progress = {"step": 50, "sequences": 9, "seed": 3, "seq_len": training["seq_len"]}
    schedule = {"steps": 100, "learning_rate": 3e-4, "warmup_steps": 10}
    (saved / "step-00000050" / "trainer.json").write_text(json.dumps(progress | schedule))
    command = words("emit-launch --checkpoint-dir saved --seed 3 --warmup-steps 10 --steps")
    assert exit_code_of([*command, "100"]) == 0
    assert "from here on" not in capsys.readouterr().err
    assert exit_code_of([*command, "400"]) == 2
    assert "steps 100 there, 400 from here on" in capsys.readouterr().err
    assert exit_code_of(["run", "--dry-run", *command[1:], "400"]) == 2
    assert exit_code_of([*command, "400", "--allow-changes"]) == 0
    assert "the learning rate of step 51 is" in capsys.readouterr().err
    assert exit_code_of([*command, "100", "--seed", "4"]) == 2


def test_each_option_of_pods_reaches_the_manifest(
    plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = words("emit-launch --target kubernetes --image torch")
    bare = answer(capsys, *command)["script"]
    for flag, (given, value) in PODS.items():
        script = answer(capsys, *command, *words(given))["script"]
        assert script != bare, flag
        assert value in script, flag


def test_the_log_of_nccl_is_for_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert exit_code_of(SEARCH) == 0
    capsys.readouterr()
    bare = answer(
        capsys,
        "emit-launch",
    )["script"]
    assert "INFO" not in bare
    script = answer(capsys, *words("emit-launch --nccl-debug INFO"))["script"]
    assert any("NCCL_DEBUG" in line and "INFO" in line for line in script.splitlines())


def test_rank_takes_another_layout_of_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    plans = answer(capsys, *SEARCH)["plans"]
    ranks = [plan["rank"] for plan in plans]
    digests = {answer(capsys, "emit-launch", "--rank", str(rank))["plan_sha256"] for rank in ranks}
    assert len(digests) == len(ranks) > 1


def test_what_another_software_trains_is_launched_by_a_program_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    answer(capsys, *SEARCH, "--runtime", "autocast")
    assert exit_code_of(["emit-launch"]) == 2
    (tmp_path / "own.py").write_text("")
    assert exit_code_of(["emit-launch", "--script", "own.py"]) == 0


def test_a_container_runs_the_python_that_it_has(
    plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = answer(capsys, *words("emit-launch --container pytorch.sqsh"))["script"]
    assert "\npython=(python3) " in script
    assert '"${python[@]}" -m torch.distributed.run' in (unpacked(script) or "")


@pytest.mark.parametrize(
    "given",
    ["--container-mount /a:/b", "--target ssh --out job", "--image i", "--target nowhere"],
)
def test_an_option_without_a_meaning_is_refused(given: str, plan: Path) -> None:
    assert exit_code_of(["emit-launch", *words(given)]) == 2


@pytest.mark.parametrize("target", ["slurm", "ssh", "kubernetes"])
def test_a_plan_is_launched_in_more_than_one_way(
    target: str, plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = ("--image", "torch") if target == "kubernetes" else ()
    said = answer(capsys, "emit-launch", "--target", target, *image)
    assert said["target"] == target
    assert said["plan_sha256"] in said["script"]


def test_out_writes_a_job_folder(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(["emit-launch", "--out", "job", "--steps", "5"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "job/job.sbatch" in err
    assert {"job.sbatch", "fsdpplan.json", "trainer"} <= {p.name for p in (plan / "job").iterdir()}
    assert "--steps=5" in (plan / "job" / "job.sbatch").read_text()
    assert exit_code_of(["emit-launch", "--out", "job"]) == 2


def test_smoke_from_and_target_change_what_run_does(
    plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dry = words("run --dry-run")
    emitted = answer(capsys, *dry)
    assert "emitted" in emitted["origin"]
    assert answer(capsys, *dry, "--smoke")["origin"].startswith("smoke run")
    assert answer(capsys, *dry, "--target", "here")["target"] == "here"
    (plan / "job.sbatch").write_text(emitted["script"])
    assert answer(capsys, *dry, "--from", "script")["origin"].endswith("job.sbatch")
    assert "emitted" in answer(capsys, *dry, "--from", "plan")["origin"]


ELSEWHERE = {
    "--muon-learning-rate": "cli/options/test_options.py",
    "--muon-weight-decay": "cli/options/test_options.py",
    "--muon-momentum": "cli/options/test_options.py",
    "--muon-nesterov": "cli/options/test_options.py",
    "--muon-ns-steps": "cli/options/test_options.py",
    "--expert-bias-rate": "cli/options/test_options.py",
    "--router-aux-loss-coef": "cli/options/test_options.py",
    "--drop-expert-bias": "trainer/huggingface/test_balance.py",
    "--host-memory": "cli/commands/test_recommend.py",
    "--nodes": "slurm/test_detect_nodes.py, cli/commands/test_calibrate.py",
    "--no-save": "cli/commands/test_recommend.py",
    "--why": "cli/commands/test_explain.py, search/advice/test_why.py",
    "--rules": "cli/commands/test_rules.py",
    "--record": "cli/commands/test_detect.py",
    "--overlay": "cli/commands/test_trace.py, run/trace/test_overlay.py",
    "--micro-batches": "cli/commands/test_trace.py",
    "--processes": "cli/commands/test_calibrate.py",
    "--seconds": "cli/commands/test_calibrate.py",
    "--plan": "cli/commands/test_calibrate.py",
    "--check": "cli/commands/test_calibrate.py",
    "--tolerance": "cli/commands/test_calibrate.py",
    "--kind": "cli/commands/test_profiles.py",
    "--toml": "cli/commands/test_profiles.py",
    "--allow-sockets": "cli/commands/test_run.py",
    "--attach": "cli/commands/test_run_again.py",
    "--resume": "cli/commands/test_run_again.py",
    "--job": "cli/commands/test_run_again.py, cli/commands/test_status.py",
    "--chain": "cli/commands/test_run_again.py",
    "--cancel-on-exit": "cli/commands/test_run_again.py",
    "--node": "cli/commands/test_status.py",
    "--stage-blocks": "cli/commands/test_estimate.py",
    "--checkpoint-blocks": "cli/commands/test_estimate.py",
    "--tail": "cli/commands/test_status.py",
    "--follow": "cli/commands/test_status.py",
    "--all": "cli/commands/test_status.py",
    "--fallback": "cli/commands/test_fallback.py",
    "--alerts": "cli/commands/test_fallback.py",
    "--ledger": "cli/commands/test_ledger.py",
    "--no-ledger": "cli/commands/test_ledger.py",
    "--cluster": "cli/commands/test_ledger.py",
    "--export": "cli/commands/test_ledger.py",
    "--runs": "cli/commands/test_learn.py",
    "--software": "cli/commands/test_learn.py",
    "--leave-one-out": "cli/commands/test_learn.py",
    "--ranks": "cli/commands/test_rehearse.py",
    "--build": "cli/commands/test_rehearse.py",
    "--whole-step": "cli/commands/test_rehearse.py",
    "--program": "cli/commands/test_program.py",
    "--experts-over-tp": "cli/options/test_options.py",
    "--torch": "cli/resolve/test_torch.py",
    "--rehearsed": "cli/commands/test_rehearse.py",
    "--min-mfu": "cli/commands/test_verify.py",
    "--max-reserved": "cli/commands/test_verify.py",
    "--max-error": "cli/commands/test_verify.py",
    "--min-overlap": "cli/commands/test_verify.py",
    "--max-idle": "cli/commands/test_verify.py",
    "--collectives": "cli/commands/test_validate.py",
    "--matmuls": "cli/commands/test_validate.py",
    "--domain-gpus": "cli/resolve/test_cluster.py",
    "--segment": "emit/test_segments.py",
    "--nvlink-label": "emit/test_segments.py",
    "--free": "cli/commands/test_what_if.py",
    "--sensitivities": "cli/commands/test_sensitivities.py",
    "--gain": "cli/commands/test_gains.py",
    "--price": "cli/commands/test_sweep.py",
    "--scaling": "cli/commands/test_sweep.py",
    "--csv": "cli/commands/test_sweep.py",
    "--report": "report/test_pages.py",
    "--quick": "report/test_pages.py",
    "--run": "report/test_pages.py",
    "--min-gpus": "cli/commands/test_min_gpus.py",
    "--epochs": "cli/commands/test_goal.py",
    "--fine-tune": "cli/commands/test_fine_tune.py",
    "--deadline": "cli/commands/test_goal.py",
    "--deadline-chance": "cli/commands/test_goal.py",
    "--provider": "cli/commands/test_goal.py",
    "--node-watts": "cli/commands/test_goal.py",
    "--pue": "cli/commands/test_goal.py",
    "--co2-per-kwh": "cli/commands/test_goal.py",
    "--objective": "cli/commands/test_goal.py",
    "--assert": "cli/commands/test_check.py",
    "--lock": "cli/commands/test_check.py",
    "--write-lock": "cli/commands/test_check.py",
    "--again": "cli/commands/test_check.py",
    "--list": "cli/commands/test_check.py",
    "--keep-global-batch": "cli/commands/test_replan.py",
    "--storage-bw": "cli/commands/test_replan.py",
    "--from-slurm": "cli/commands/test_from_slurm.py",
    "--no-plan": "cli/commands/test_bug_report.py",
    "--lora": "cli/commands/test_adapters.py",
    "--lora-alpha": "cli/commands/test_adapters.py",
    "--lora-rs": "cli/commands/test_adapters.py",
    "--lora-targets": "cli/commands/test_adapters.py",
    "--lora-dropout": "cli/commands/test_adapters.py",
    "--lora-dtype": "cli/commands/test_adapters.py",
    "--base": "cli/commands/test_adapters.py",
    "--export-peft": "trainer/huggingface/test_peft.py",
    "--peft": "trainer/huggingface/test_peft.py",
    "--merged": "trainer/huggingface/test_peft.py",
    "--as-trained": "trainer/huggingface/test_peft.py",
}
"""Options that other tests show to change what is done."""


def test_every_option_is_tested() -> None:
    tested = {*PLANNING, *JOB, *TOGETHER, *PODS}
    tested |= {"--rank", "--out", "--smoke", "--dry-run", "--from", "--target"}
    tested |= {"--nccl-debug", "--nccl"}
    tested |= ELSEWHERE.keys()
    tested |= {"--json", "--save", "--help", "-h"}
    commands: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    flags = {
        flag
        for command in commands.values()
        for parameter in command.params
        if parameter.param_type_name == "option"
        for flag in parameter.opts
    }
    assert flags <= tested, flags - tested


@pytest.mark.skipif(find_spec("wandb") is not None, reason="wandb is installed here")
@pytest.mark.parametrize("command", ["emit-launch", "run --dry-run --from plan"])
def test_a_library_that_a_named_python_lacks_is_said_before_the_queue(
    command: str, plan: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of this Python, and of another one; not of one that the job's environment will have."""
    monkeypatch.undo()
    monkeypatch.chdir(plan)
    on_a_machine_without_gpus(monkeypatch)
    other = plan / "python"
    other.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    other.chmod(0o755)
    for python in (sys.executable, str(other)):
        given = (*words(command), "--python", python, "--wandb", "llamas")
        assert exit_code_of(given) == 2
        error = capsys.readouterr().err
        assert error.count("--wandb needs the Python package wandb, which") == 1
        assert f"{python} -m pip install wandb" in error
    assert exit_code_of((*words(command), "--env-setup", "module load x", "--wandb", "l")) == 0


def test_libraries_that_the_plans_training_needs_are_looked_for_where_torch_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Python without torch is not the one that the job will have."""
    monkeypatch.chdir(tmp_path)
    question = f"{ONE_NODE} --optimizer adamw_8bit".replace("estimate", "recommend", 1)
    assert exit_code_of((*question.split(), "--save", "plan.json")) == 0
    for lacking, code in ((["torchao"], 2), (["torch", "torchao"], 0), ([], 0)):
        monkeypatch.setattr(job, "lacking_packages", lambda *_, found=lacking: found)
        capsys.readouterr()
        assert exit_code_of(("emit-launch", "plan.json", "--python", sys.executable)) == code
        error = capsys.readouterr().err
        assert ("optimizer adamw_8bit needs the Python package torchao" in error) is (code == 2)
