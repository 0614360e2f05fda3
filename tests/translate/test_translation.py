"""Whole files become configurations that preflight accepts, and every option is translated or in a remark."""

from pathlib import Path
from typing import get_origin

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import SEEDS, try_mutations

from megasync.config import load_config
from megasync.config.limits import check_limits
from megasync.config.load import schema_keys
from megasync.config.rules import check_rules
from megasync.errors import ConfigError
from megasync.preflight.check import check_config, check_supervised
from megasync.translate import report, translate
from megasync.translate.page import PAGE, page
from megasync.translate.table import SHOWN, TABLES
from megasync.translate.translation import LOOKS

DENSE, SPARSE = "configs/models/qwen3_8b.json", "configs/models/qwen3_30b_a3b.json"

VERL = """
set -x
DATA=${DATA:-"${HOME}/data"}
train="['$DATA/easy/train.parquet', '$DATA/hard/train.parquet']"
prompt=$((1024 * 2))
python3 -m verl.trainer.main_ppo --config-path=config \\
    --config-name='ppo_megatron_trainer.yaml'\\
    algorithm.adv_estimator=grpo \\
    data.train_files="$train" data.val_files=$DATA/test.parquet \\
    data.train_batch_size=256 data.max_prompt_length=${prompt} data.max_response_length=4096 data.prompt_key=question \\
    data.truncation='left' \\
    actor_rollout_ref.model.path=Qwen/Qwen3-8B \\
    actor_rollout_ref.actor.optim.lr=2e-6 actor_rollout_ref.actor.optim.lr_warmup_steps=-1 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \\
    actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576 \\
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \\
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.01 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean actor_rollout_ref.actor.clip_ratio_high=0.3 \\
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \\
    +actor_rollout_ref.actor.megatron.override_transformer_config.attention_backend=flash \\
    +actor_rollout_ref.actor.megatron.override_transformer_config.num_layers=3 \\
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.top_p=0.9 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.val_kwargs.do_sample=True \\
    actor_rollout_ref.rollout.val_kwargs.temperature=0.6 actor_rollout_ref.rollout.val_kwargs.n=4 \\
    custom_reward_function.path=rewards/rules.py custom_reward_function.name=score \\
    trainer.total_training_steps=300 trainer.nnodes=1 trainer.n_gpus_per_node=8 \\
    trainer.save_freq=-1 trainer.test_freq=5 \\
    trainer.experiment_name='a run/of mine' trainer.logger=['console','wandb'] trainer.made_up=1 $@
"""
SLIME = """
source models/qwen3-8B.sh
CKPT_ARGS=(
   --hf-checkpoint /models/Qwen3-8B
   #--hf-checkpoint /models/other
)
ROLLOUT_ARGS=(
   --prompt-data $DATA/train.jsonl
   --input-key question --label-key label --apply-chat-template
   --rm-type math --num-rollout 100 --rollout-batch-size 32 --n-samples-per-prompt 8
   --rollout-max-response-len 4096 --rollout-temperature 0.8 --num-steps-per-rollout 4
   --dynamic-sampling-filter-path filters.check_reward_nonzero_std
)
PERF_ARGS=(--tensor-model-parallel-size 2 --sequence-parallel --max-tokens-per-gpu 9216 --use-dynamic-batch-size)
GRPO_ARGS=(--advantage-estimator gspo --eps-clip 3e-4 --eps-clip-high 4e-4 --use-tis --use-kl-loss --kl-loss-coef 0.0)
ray job submit --address=http://here -- python3 train_async.py --actor-num-nodes 1 --actor-num-gpus-per-node 4 \\
   --rollout-num-gpus 4 --rollout-num-gpus-per-engine 2 --sglang-attention-backend flashinfer --sglang-tp-size 4 \\
   ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]} ${PERF_ARGS[@]} ${GRPO_ARGS[@]} --made-up 1 \\
   --update-weight-buffer-size 536870912 --save-interval 20 --eval-prompt-data test $DATA/test.jsonl --eval-interval 10
"""
TRL = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

STEPS = 200
rows = load_dataset("someone/sums", "easy", split="train")
config = GRPOConfig(
    output_dir="out/sums", per_device_train_batch_size=4, gradient_accumulation_steps=8, num_generations=8, beta=0.04,
    max_completion_length=1024, learning_rate=1e-5, max_steps=STEPS, loss_type="dr_grpo", use_vllm=True, made_up=1,
    vllm_mode="server", mask_truncated_completions=True, chat_template_kwargs={"enable_thinking": False},
    run_name=compute(),
)
trainer = GRPOTrainer(model="Qwen/Qwen3-8B", args=config, train_dataset=rows, reward_funcs=accuracy_reward)
"""
FILES = {"verl": ("run.sh", VERL), "slime": ("run.sh", SLIME), "trl": ("run.py", TRL)}


@pytest.fixture
def made(tmp_path):
    def make(source: str, text: str | None = None, name: str | None = None):
        own_name, own_text = FILES[source]
        path = tmp_path / (name or own_name)
        path.write_text(own_text if text is None else text)
        return translate(source, path)

    return make


def check(translation, model: str = DENSE) -> None:
    """As `megasync plan` does, with a config.json in place of the model."""
    config = load_config(translation.config, [f"model.config={model}", "model.path=none"], unset=True)
    (check_supervised if translation.supervised else check_config)(config, planning=True)


EXPECTED = {
    "verl": {
        "model": {"path": "Qwen/Qwen3-8B"},
        "name": "of-mine",
        "data": {
            "columns": {"prompt": "question"},
            "eval": {"kind": "parquet", "source": "~/data/test.parquet"},
            "prompt": {"format": "chat", "max_tokens": 2048},
            "sets": {
                # The names of the files are alike, so those of their folders tell them apart.
                "easy": {"data": {"kind": "parquet", "source": "~/data/easy/train.parquet"}},
                "hard": {"data": {"kind": "parquet", "source": "~/data/hard/train.parquet"}},
            },
        },
        "schedule": {"total_steps": 300, "groups_per_step": 256, "max_staleness": 0},
        "trainer": {
            "tensor_parallel": 2,
            "pipeline_parallel": 2,
            "data_parallel": 2,
            "minibatches": 4,
            "sequence_parallel": True,
            "tokens_per_microbatch": 24576,
            "recompute": "full",
            "megatron": {"model": {"attention_backend": "flash"}},
            "optimizer": {"lr": 2e-6, "weight_decay": 0.01, "betas": [0.9, 0.999]},
        },
        "rollout": {
            "servers": 4,
            "tensor_parallel": 2,
            "mem_fraction": 0.5,
            "reward": "rewards.rules:score",
            "sampling": {"max_new_tokens": 4096, "top_p": 0.9, "top_k": 4096},
        },
        "algorithm": {"clip_high": 0.3, "aggregation": "sequence", "kl_coef": 0.01, "correction": "none"},
        "eval": {"every_steps": 5, "repeats": 4, "temperatures": [0.6]},
        "checkpoint": {"every_steps": 0},
        "cluster": {"colocate": True, "device": "cuda"},
    },
    "slime": {
        "model": {"path": "/models/Qwen3-8B"},
        "data": {
            "columns": {"prompt": "question", "answer": "label"},
            "train": {"kind": "jsonl", "source": "${oc.env:DATA}/train.jsonl"},
            "eval": {"kind": "jsonl", "source": "${oc.env:DATA}/test.jsonl"},
            "prompt": {"format": "chat"},
            "shuffle": False,
        },
        "schedule": {"groups_per_step": 32},
        "trainer": {
            "tensor_parallel": 2,
            "data_parallel": 2,
            "minibatches": 4,
            "sequence_parallel": True,
            "tokens_per_microbatch": 9216,
            "optimizer": {"decay": "linear", "weight_decay": 0.01, "betas": [0.9, 0.999]},
        },
        "rollout": {
            "tensor_parallel": 2,
            "reward": "math",
            "groups": {"drop_uniform": True},
            "sampling": {"max_new_tokens": 4096, "temperature": 0.8},
            "server_args": {"--attention-backend": "flashinfer"},
        },
        "algorithm": {"loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence"},
        "sync": {"bucket_mb": 512},
        "eval": {"temperatures": [0.8]},
        "checkpoint": {"every_steps": 20},
        "cluster": {"device": "cuda"},
    },
    "trl": {
        "model": {"path": "Qwen/Qwen3-8B"},
        "data": {
            "columns": {"answer": "solution"},
            "prompt": {"format": "chat"},
            "train": {"kind": "hf", "source": "someone/sums", "split": "train", "options": {"name": "easy"}},
        },
        "schedule": {"total_steps": 200, "groups_per_step": 4, "max_staleness": 0},
        "trainer": {"recompute": "full", "optimizer": {"lr": 1e-5, "decay": "linear", "betas": [0.9, 0.999]}},
        "rollout": {
            "servers": 1,
            "reward": "math",
            "chat": {"template_options": {"enable_thinking": False}},
            "groups": {"overlong": "mask"},
            "sampling": {"max_new_tokens": 1024},
        },
        "algorithm": {
            "aggregation": "constant",
            "kl_coef": 0.04,
            "clip_high": 0.2,
            "dual_clip": None,
            "correction": "product",
            "correction_cap": 3.0,
            "correction_outside": "mask",
        },
        "cluster": {"device": "cuda"},
    },
}


@pytest.mark.parametrize("source", TABLES)
def test_a_whole_file_becomes_a_configuration_that_preflight_accepts(made, source):
    translation = made(source)
    # As text, which shows what differs.
    assert yaml.safe_dump(translation.config) == yaml.safe_dump(EXPECTED[source])
    check(translation)


@pytest.mark.parametrize(
    ("source", "kind", "option", "said"),
    [
        ("verl", "unknown", "trainer.made_up", "`1`"),
        ("verl", "without", "data.truncation", "an error at start"),
        ("verl", "without", "trainer.logger", "observe.wandb"),
        ("verl", "without", "actor_rollout_ref.actor.megatron.override_transformer_config.num_layers", "cannot be set"),
        ("verl", "open", "", "an argument of the script"),
        ("slime", "unknown", "made-up", "`1`"),
        ("slime", "open", "", "MODEL_ARGS is not set in this file"),
        ("slime", "without", "sglang-tp-size", "set tensor_parallel instead"),
        ("trl", "unknown", "made_up", "`1`"),
        ("trl", "open", "run_name", "known only when the script runs"),
        ("trl", "open", "", "how many processes"),
    ],
)
def test_what_is_not_translated_is_in_a_remark(made, source, kind, option, said):
    found = [remark.text for remark in made(source).of(kind) if remark.option == option]
    assert any(said in text for text in found), found


def overrides(**values: object) -> str:
    """A verl script with the least that it needs, and more."""
    given = {"actor_rollout_ref.model.path": "m/m", "data.train_files": "a.parquet", "algorithm.adv_estimator": "grpo"}
    given |= {"actor_rollout_ref.rollout.n": 8, "trainer.total_training_steps": 10} | values
    return "python -m verl.trainer.main_ppo " + " ".join(f"{name}={value}" for name, value in given.items())


def flags(*more: str) -> str:
    given = "--hf-checkpoint m --prompt-data a.jsonl --input-key prompt --rollout-batch-size 8 --n-samples-per-prompt 8"
    return f"python train.py {given} --num-rollout 10 --colocate {' '.join(more)}"


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("values", "key", "value"),
    [
        ({"rollout.nnodes": 1, "async_training.staleness_threshold": 0.5}, "schedule.max_staleness", 1),
        ({"async_training.staleness_threshold": 1.5}, "schedule.max_staleness", 2),
        ({"async_training.trigger_parameter_sync_step": 2}, "schedule.weight_sync_steps", 2),
        ({"async_training.require_batches": 3, "actor_rollout_ref.actor.ppo_mini_batch_size": 8},
         "trainer.minibatches", 3),
        ({"async_training.require_batches": 3, "actor_rollout_ref.actor.ppo_mini_batch_size": 8},
         "schedule.groups_per_step", 24),
        ({"algorithm.adv_estimator": "gae"}, "critic.enabled", True),
        ({"algorithm.adv_estimator": "rloo_vectorized"}, "algorithm.advantage", "rloo"),
        ({"actor_rollout_ref.actor.policy_loss.loss_mode": "clip_cov",
          "actor_rollout_ref.actor.policy_loss.clip_cov_ratio": 0.01}, "algorithm.loss_options.share", 0.01),
        ({"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.1}, "algorithm.kl_in", "reward"),
        ({"algorithm.rollout_correction.rollout_is": "sequence"}, "algorithm.correction", "product"),
        ({"algorithm.rollout_correction.rollout_is": "token",
          "algorithm.rollout_correction.rollout_is_threshold": "0.5_2.0"}, "algorithm.correction_outside", "mask"),
        ({"algorithm.rollout_correction.bypass_mode": True}, "algorithm.ratio", "behaviour"),
        ({"actor_rollout_ref.model.lora.rank": 8,
          "actor_rollout_ref.model.lora.target_modules": "[linear_qkv]"}, "trainer.lora.targets",
         ["q_proj", "k_proj", "v_proj"]),
        ({"reward_model.enable": True, "reward_model.model.path": "r/m"}, "rollout.rewards.reward.model", "reward"),
        ({"actor_rollout_ref.rollout.val_kwargs.n": 4, "data.val_files": "b.parquet"}, "eval.temperatures", None),
        ({"actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": 0.2}, "trainer.optimizer.warmup_steps", 2),
        ({"trainer.nnodes": 4}, "trainer.data_parallel", 16),
        ({"trainer.nnodes": 4}, "rollout.servers", 8),
        ({"trainer.nnodes": 4}, "cluster.address", "auto"),
    ],
)  # fmt: skip
def test_options_of_verl(made, values, key, value):
    translation = made("verl", overrides(**values))
    config = load_config(translation.config, ["model.path=none"])
    node = config
    for part in key.split("."):
        node = node[part] if isinstance(node, dict) else getattr(node, part)
    assert node == ([0.0] if value is None else value)
    check(translation)


@pytest.mark.parametrize(
    ("more", "key", "value"),
    [
        (["--advantage-estimator ppo", "--value-clip 0.3"], "critic.clip", 0.3),
        (["--kl-coef 0.1"], "algorithm.kl_in", "reward"),
        (["--use-kl-loss", "--kl-loss-coef 0.1", "--kl-loss-type k3"], "algorithm.kl_coef", 0.1),
        (["--calculate-per-token-loss"], "algorithm.aggregation", "token"),
        (["--disable-grpo-std-normalization"], "algorithm.normalize_std", False),
        (["--optimizer-cpu-offload"], "trainer.optimizer.offload", 1.0),
        (["--partial-rollout", "--mask-offpolicy-in-partial-rollout"], "schedule.stale", "mask"),
        (["--rollout-stop a b"], "rollout.sampling.stop", ["a", "b"]),
        (["--eval-prompt-data one 1.jsonl two 2.jsonl"], "eval.sets.two.data.source", "2.jsonl"),
        (["--use-wandb", "--wandb-group 'my group'"], "name", "my-group"),
        (["--rollout-temperature 0.5", "--eval-prompt-data a b.jsonl"], "eval.temperatures", [0.5]),
    ],
)
def test_options_of_slime(made, more, key, value):
    translation = made("slime", flags(*more))
    node = load_config(translation.config)
    for part in key.split("."):
        node = node[part] if isinstance(node, dict) else getattr(node, part)
    assert node == value
    check(translation)


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("importance_sampling_level: sequence\nloss_type: grpo", "algorithm.loss", "gspo"),
        ("loss_type: cispo", "algorithm.loss", "cispo"),
        ("scale_rewards: false", "algorithm.normalize_std", False),
        ("lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr_rate: 0.1}\nlearning_rate: 1e-5",
         "trainer.optimizer.min_lr", 1e-6),
        ("max_steps: 100\nwarmup_ratio: 0.1", "trainer.optimizer.warmup_steps", 10),
        ("num_processes: 4", "trainer.data_parallel", 4),
        ("num_processes: 4\nvllm_tensor_parallel_size: 2\nuse_vllm: true", "rollout.servers", 2),
        ("eval_strategy: steps\neval_steps: 5", "data.eval.split", "test"),
        ("use_peft: true\nlora_target_modules: all-linear", "trainer.lora.targets", []),
        ("reward_funcs: [my.rules.exact, accuracy_reward]\nreward_weights: [1.0, 0.5]",
         "rollout.rewards.exact.function", "my.rules:exact"),
    ],
)  # fmt: skip
def test_options_of_trl(made, text, key, value):
    given = f"model_name_or_path: m/m\ndataset_name: a/b\nper_device_train_batch_size: 8\nnum_generations: 8\n{text}\n"
    translation = made("trl", given, "run.yaml")
    node = load_config(translation.config)
    for part in key.split("."):
        node = node[part] if isinstance(node, dict) else getattr(node, part)
    assert node == value
    check(translation)


@pytest.mark.parametrize(
    ("source", "name", "text", "key"),
    [
        ("verl", "sft.sh", "torchrun -m verl.trainer.sft_trainer data.train_files=a.parquet data.max_length=512 "
         "model.path=m/m optim.lr=2e-5 trainer.total_epochs=2", "sft.max_tokens"),
        ("slime", "sft.sh", flags("--loss-type sft_loss", "--num-epoch 2").replace("--colocate", ""), "sft.epochs"),
        ("trl", "sft.yaml", "model_name_or_path: m/m\ndataset_name: a/b\npacking: true\nmax_length: 512\n",
         "sft.max_tokens"),
        ("trl", "sft.py", "SFTTrainer(model='m/m', args=SFTConfig(max_length=512, learning_rate=1e-5))\n"
         "load_dataset('a/b')", "sft.max_tokens"),
    ],
)  # fmt: skip
def test_supervised_training_is_recognised(made, source, name, text, key):
    translation = made(source, text, name)
    assert translation.supervised and key.split(".")[1] in translation.config["sft"]
    assert "megasync sft" in report(translation)
    check(translation)


@pytest.mark.parametrize(
    ("path", "module", "said"),
    [
        ("rewards/rules.py", "rewards.rules", ""),
        ("/home/me/rules.py", "rules", "put /home/me on PYTHONPATH"),
        ("~/my-rewards/rules.py", "rules", "put ~/my-rewards on PYTHONPATH"),
    ],
)
def test_a_reward_in_another_folder_is_named_and_has_to_be_found(made, path, module, said):
    translation = made("verl", overrides(**{"custom_reward_function.path": path}))
    assert translation.config["rollout"]["reward"] == f"{module}:compute_score"
    assert [each.text[: len(said)] for each in translation.of("open") if "reward" in each.option] == [said] * bool(said)


@pytest.mark.parametrize("option", ["--custom-rm-path my.rules.score", "--rm-type f1"])
def test_a_reward_that_slime_calls_is_to_be_filled_in(made, option):
    assert any("rollout.reward" in each.text for each in made("slime", flags(option)).of("open"))


def test_files_and_a_processor_of_a_trl_script_are_kept(made):
    script = TRL.replace('"someone/sums", "easy"', '"json", data_files="rows.jsonl"').replace(
        "beta", "use_cpu=True, beta"
    )
    translation = made("trl", script)
    assert translation.config["data"]["train"] == {"kind": "jsonl", "source": "rows.jsonl"}
    assert translation.config["cluster"]["device"] == "cpu"


def test_contradictions_are_resolved_and_said(made):
    translation = made("slime", flags("--advantage-estimator grpo", "--n-samples-per-prompt 1"))
    (chosen,) = translation.of("choice")[-1:]
    assert "needs schedule.samples_per_group above 1" in chosen.text and "Chosen: " in chosen.text
    check(translation)


def test_half_a_section_is_left_out(made):
    translation = made("verl", overrides(**{"reward_model.enable": True}))
    assert "reward_models" not in translation.config and "rewards" not in translation.config["rollout"]
    assert any("reward_models.reward is left out" in remark.text for remark in translation.of("choice"))
    check(translation)


def test_parts_of_nodes_are_not_left_over(made):
    translation = made("verl", overrides(**{"trainer.nnodes": 3, "trainer.n_gpus_per_node": 8, "rollout.nnodes": 1,
                                            "async_training.partial_rollout": True,
                                            "actor_rollout_ref.actor.ulysses_sequence_parallel_size": 1,
                                            "actor_rollout_ref.rollout.tensor_model_parallel_size": 3}))  # fmt: skip
    config = load_config(translation.config)
    assert config.rollout.servers in (1, 2) and config.trainer.data_parallel == 24


def test_steps_follow_from_the_rows_where_they_can_be_counted(made, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n\n' * 64)
    translation = made(
        "slime", flags(f"--prompt-data {tmp_path}/rows.jsonl", "--num-epoch 3").replace("--num-rollout 10", "")
    )
    assert translation.config["schedule"]["total_steps"] == 24
    translation = made("slime", flags("--num-epoch 3").replace("--num-rollout 10", ""))
    assert any("3 passes over the rows" in remark.text for remark in translation.of("open"))


@pytest.mark.parametrize(
    ("source", "name", "text", "said"),
    [
        ("slime", "run.sh", VERL, "looks like a file of verl, not of slime; use --from verl"),
        ("verl", "run.sh", SLIME, "looks like a file of slime, not of verl; use --from slime"),
        ("verl", "run.sh", "python -m openrlhf.cli.train_ppo --pretrain m", "looks like a file of OpenRLHF"),
        (
            "verl",
            "run.yaml",
            "rollout: {max_head_offpolicyness: 2}\ngconfig: {n_samples: 4}",
            "looks like a file of AReaL",
        ),
        ("slime", "run.sh", "echo hello", "has no option of slime"),
        ("trl", "run.py", "DPOTrainer(args=DPOConfig(beta=0.1))", "DPOConfig trains on preferences"),
        ("trl", "run.py", "x = (", "Python does not parse it"),
        ("verl", "run.sh", "", "has no option of verl"),
    ],
)
def test_files_of_others_are_refused(made, source, name, text, said):
    with pytest.raises(ConfigError, match="run") as error:
        made(source, text, name)
    assert said in str(error.value)


def test_an_unknown_library_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'verl'"):
        translate("Verl", tmp_path)
    with pytest.raises(ConfigError, match="name one of verl, slime, trl"):
        translate("other", tmp_path)


# The table


ROWS = [(library, row) for library, rows in (TABLES | SHOWN).items() for row in rows]


def test_every_key_of_the_table_exists():
    """Or it is among free-form pairs, or an entry of a named section."""
    hints = dict(schema_keys())
    pairs = [f"{key}." for key, hint in hints.items() if get_origin(hint) is dict]
    missing = [row.key for _, row in ROWS if row.key and row.key not in hints and not row.key.startswith(tuple(pairs))]
    assert missing == []


def test_every_row_says_something():
    assert [row for _, row in ROWS if not row.key and not row.note] == []
    assert set(TABLES) <= set(LOOKS)


def test_the_page_is_up_to_date():
    """`python -m megasync.translate.page` updates it."""
    assert PAGE.read_text(encoding="utf-8") == page()


VALUES = st.one_of(
    st.integers(-2, 4096),
    st.floats(allow_nan=True),
    st.booleans(),
    st.sampled_from(["", "a", "grpo", "token", "sequence", "a.jsonl", "a/b", "full", "0.5_2", None, [], ["a", 1], {}]),
)


@pytest.mark.every(2)
@pytest.mark.parametrize("source", TABLES)
@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_options_are_translated_or_said_and_accepted(source, tmp_path, data):
    """Values of any type for any options of the table: no crash, no option without a word, no refused key."""
    names = sorted({name for row in TABLES[source] for name in row.spellings if "*" not in name})
    given = data.draw(st.dictionaries(st.sampled_from(names), VALUES, min_size=2, max_size=12))
    path = tmp_path / "run.yaml"
    nested = {}
    for name, value in given.items():
        node = nested
        *above, last = name.split(".") if source == "verl" else [name]
        for part in above:
            node = node.setdefault(part, {}) if isinstance(node, dict) else {}
        if isinstance(node, dict) and not isinstance(node.get(last), dict):
            node[last] = value
    path.write_text(yaml.safe_dump(nested))
    try:
        translation = translate(source, path)
    except ConfigError as error:
        assert "looks like a file of" in str(error) or "has no option" in str(error) or "not valid YAML" in str(error)
        return
    config = load_config(translation.config, ["model.path=none"], unset=True)
    check_limits(config)
    check_rules(config, {"run's held-out sets": (config.data.eval is not None) + len(config.eval.sets)},
                **({"within": ("trainer", "sft")} if translation.supervised else {"without": ["sft"]}))  # fmt: skip
    said = {entry.option for entry in translation.translated} | {remark.option for remark in translation.remarks}
    leaves = {name for name in given if name in said or "." in name}
    assert leaves | said >= {name for name in given if "." not in name}
    assert report(translation).startswith(f"# Translated from {source}")


@pytest.mark.every(2)
@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("source", FILES)
def test_a_damaged_file_is_translated_or_refused(source, tmp_path, seeds):
    name, text = FILES[source]
    path = tmp_path / name

    def read(content):
        path.write_bytes(content)
        translation = translate(source, path)
        load_config(translation.config, ["model.path=none"], unset=True)
        report(translation)

    try_mutations(read, text.encode(), seeds, ConfigError)


def test_nothing_of_a_script_is_run(made, tmp_path):
    mark = Path(tmp_path / "ran")
    made("verl", overrides() + f" x.y=$(touch {mark})\ntouch {mark}\n")
    made("trl", f"open({str(mark)!r}, 'w')\n{TRL}")
    assert not mark.exists()
