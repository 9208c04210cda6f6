"""Configuration: files, inheritance, overrides, and one clear line for whatever is wrong."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from spmd_rl.config.check import check, check_model_folder, check_world
from spmd_rl.config.errors import UserError
from spmd_rl.config.load import _hint_of, load_config, to_yaml, valid_keys
from spmd_rl.config.values import RANGES
from spmd_rl.main import main

ROOT = Path(__file__).parents[2]
GOOD = """
model: {path: somewhere}
data: {train: [{name: sums, generator: chain_sum, size: 10, params: {min_terms: 2}}]}
reward: {functions: [{function: reasoning_gym}]}
"""


@pytest.fixture
def good(tmp_path):
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    return path


def test_overrides_reach_nested_sections_lists_and_free_mappings(good):
    config = load_config(
        good,
        [
            "train.steps=5",
            "train.optimizer.lr=2e-5",
            "data.train[0].size=7",
            "data.train.0.params.max_terms=3",
            "rollout.stop=['\\n', END]",
            "run.name=a b",
        ],
    )
    assert (config.train.steps, config.train.optimizer.lr) == (5, 2e-5)
    assert config.data.train[0].size == 7 and config.data.train[0].params == {"min_terms": 2, "max_terms": 3}
    assert config.rollout.stop == ["\\n", "END"]
    assert config.run.folder == "runs/a b"
    check(config)


def test_inheritance_goes_through_files_relative_to_each_other(tmp_path, good):
    (tmp_path / "sub").mkdir()
    child = tmp_path / "sub" / "child.yaml"
    child.write_text("defaults: ../good.yaml\ntrain: {steps: 3}\n")
    config = load_config(child, ["train.prompts_per_step=2"])
    assert (config.train.steps, config.train.prompts_per_step, config.model.path) == (3, 2, "somewhere")
    child.write_text("defaults: child.yaml\n")
    with pytest.raises(UserError, match="inherits from itself"):
        load_config(child)


def test_further_files_and_values_are_laid_over_in_order(tmp_path, good):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("train: {steps: 3, prompts_per_step: 4}\n")
    config = load_config(good, ["train.steps=5", "train.samples_per_prompt=2", str(recipe), "train.prompts_per_step=6"])
    train = config.train
    assert (train.steps, train.prompts_per_step, train.samples_per_prompt) == (3, 6, 2)
    recipe.write_text("train: {stepz: 3}\n")
    with pytest.raises(UserError, match=r"recipe.yaml: unknown key train.stepz"):
        load_config(good, [str(recipe)])
    with pytest.raises(UserError, match=r"none.yaml: No such file"):
        load_config(good, [str(tmp_path / "none.yaml")])


def test_what_is_written_reads_back_equal(tmp_path, good):
    prompts = [r"data.train.0.system_prompt='数字だけ 🙂 \${x}$ \\\${y} \frac12'", "data.train.0.params.note='\\${z}'"]
    config = load_config(good, ["train.steps=5", *prompts])
    assert config.data.train[0].system_prompt == r"数字だけ 🙂 ${x}$ \${y} \frac12"
    (tmp_path / "written.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "written.yaml") == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.nnodez=4", "unknown key trainer.nnodez; the nearest valid key is train"),
        ("train.stepz=4", r"unknown key train.stepz; the nearest valid key is train.steps \(an integer\)"),
        ("train.lr=1e-3", r"unknown key train.lr; the nearest valid key is train.optimizer.lr \(a number\)"),
        ("critic.lr=1", "unknown key critic.lr; .* train.optimizer.lr"),
        ("train.steps=abc", "train.steps: an integer is wanted, not 'abc'"),
        ("train.steps=1.5", "train.steps: an integer is wanted, not 1.5"),
        ("train.steps=true", "train.steps: an integer is wanted, not True"),
        ("observe.nvtx=maybe", "observe.nvtx: true or false is wanted, not 'maybe'"),
        ("train.optimizer=5", "train.optimizer is a section with keys such as lr"),
        ("train.optimizer.betas=3", r"betas: a list \(a number each\) is wanted, not 3"),
        ("data.train[3].size=1", "list index out of range"),
        ("data.train=x", "data.train wants a list of sections"),
        ("nonsense", "'nonsense' is not of the form section.key=value"),
        ("rollout.engine=vlm", "rollout.engine='vlm' is not known: one of vllm, transformers .* did you mean vllm"),
        ("train.samples_per_prompt=0", "train.samples_per_prompt=0: at least 1 is wanted"),
        ("train.updates_per_step=9", "updates_per_step=9 is more than train.prompts_per_step=8"),
        ("rollout.temperature=0", "rollout.temperature=0.0: at least 0.01 and at most 100 is wanted"),
        ("model.lora_alpha=8", "mean nothing with model.lora_rank=0: set a rank"),
        ("model.lora_rank=-1", "model.lora_rank=-1: at least 0 is wanted"),
        ("rollout.top_p=1.5", "rollout.top_p=1.5: a number above 0 and at most 1 is wanted"),
        ("eval.samples_per_prompt=4", "eval.temperature=0 draws the same response"),
        ("eval.pass_at=[3]", "eval.pass_at=3 needs 1 <= k <= eval.samples_per_prompt=1"),
        ("train.optimizer.lr=.nan", "train.optimizer.lr=nan: a finite number is wanted"),
        ("train.optimizer.grad_clip=nan", "train.optimizer.grad_clip=nan: a finite number is wanted"),
        ("reward.functions[0].weight=.inf", r"reward.functions\[0\].weight=inf: a finite number is wanted"),
        ("train.optimizer.betas=[0.9,1]", r"betas\[1\]=1.0: at least 0 and below 1 is wanted"),
        ("train.steps=0", "train.steps=0: at least 1 is wanted"),
        ("train.steps=99999999999999999999", "train.steps=99999999999999999999: no such number fits in 64 bits"),
        ("data.train[0].weight=0", r"data.train\[0\].weight=0.0: a number above 0 and at most 1e\+06 is wanted"),
        ("comm.timeout_s=1e300", r"comm.timeout_s=1e\+300: at least 0.1 and at most 1e\+06 is wanted"),
        ("observe.console_every=0", "observe.console_every=0: at least 1 is wanted"),
        ("rollout.stop=['']", r"rollout.stop\[0\] is empty"),
        ("run.folder=''", "run.folder is empty"),
        ("run.folder=a\udcff", r"run.folder: 'a\\udcff' is not UTF-8"),
        ('run.folder="a\\0"', r"run.folder: a NUL character"),
        ("eval.temperature=0.001", "eval.temperature=0.001: 0 .greedy. or at least 0.01"),
        ("rollout.max_model_tokens=100", "max_model_tokens=100 is less than data.max_prompt_tokens .* = 1280"),
        ("data.train[0].params={a: &x [*x]}", "command line: .*recursion"),
        ("reward.functions=[]", "reward.functions is empty"),
        ("data.train=[]", "data.train is empty"),
    ],
)
def test_wrong_input_is_one_line_that_says_what_would_be_right(good, override, message):
    with pytest.raises(UserError, match=message) as caught:
        check(load_config(good, [override]))
    assert "\n" not in str(caught.value)


def test_a_reference_that_is_the_actor_itself_has_nothing_to_offload(good):
    keys = ["model.lora_rank=8", "algorithm.kl_coef=0.1", "algorithm.offload_reference=true"]
    check(load_config(good, keys[:2]))
    with pytest.raises(UserError, match="with model.lora_rank the reference policy is the actor without its adapters"):
        check(load_config(good, keys))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + "trian: {steps: 3}", "unknown key trian"),
        (GOOD + "train: {stesp: 3}", "unknown key train.stesp; the nearest valid key is train.steps"),
        ("- a list", "a mapping of sections is wanted"),
        ("train: {steps: [", r"bad.yaml:\d+: not valid YAML"),
        (GOOD.replace("model: {path: somewhere}", ""), "model.path is not set"),
        (GOOD.replace("size: 10", "sise: 10"), "unknown key data.train.sise"),
        (GOOD + "train: {steps: 3}\ntrain: {steps: 4}", r"bad.yaml:5: not valid YAML \(train stands there twice\)"),
        (GOOD + "train: {steps: 3, steps: 4}", r"bad.yaml:5: not valid YAML \(steps stands there twice\)"),
        (GOOD + "run: {name: 2024-01-01}", "run.name: Value 'date' is not a supported"),
        (GOOD + "run: {name: 2024-13-41}", "bad.yaml: not valid YAML .*month must be in"),
        (GOOD + "train: &x {steps: *x}", "bad.yaml: .*"),
        (GOOD + "defaults: 5", "defaults wants the path of a YAML file or a list of them, not 5"),
        (GOOD + "defaults: [{a: b}]", "defaults wants the path"),
        ("a: [1, 2]: 3", "not valid YAML"),
    ],
)
def test_a_wrong_file_is_one_line_too(tmp_path, text, message):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_config(path)


def test_files_that_are_no_text(tmp_path):
    (tmp_path / "latin.yaml").write_bytes("run: {name: Grün}".encode("latin-1"))
    with pytest.raises(UserError, match=r"latin.yaml: not UTF-8 text \(byte 15\)"):
        load_config(tmp_path / "latin.yaml")
    with pytest.raises(UserError, match="Is a directory"):
        load_config(tmp_path)


def test_every_number_has_a_range_and_every_range_a_number():
    """Those of `algorithm` are looked at in algorithms/check.py."""

    def number(hint) -> bool:
        return any(part in (int, float) for part in (hint, *get_args(hint)))

    numbers = {key for key in valid_keys() if number(_hint_of(key)) and not key.startswith("algorithm.")}
    assert set(RANGES) == numbers


@pytest.mark.parametrize("name", ["7", "1e3", "2024-01-01", "yes", "0x10", "[a", "日本語 🙂"])
def test_a_text_on_the_command_line_is_taken_as_it_stands(good, name):
    assert load_config(good, [f"run.name={name}"]).run.name == name


def test_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nothing.yaml: No such file"):
        load_config(tmp_path / "nothing.yaml")


def test_model_folder(tmp_path, good):
    config = load_config(good, [f"model.path={tmp_path}/none"])
    with pytest.raises(UserError, match="there is no folder"):
        check_model_folder(config)
    config = load_config(good, [f"model.path={tmp_path}", "rollout.tensor_parallel=2"])
    with pytest.raises(UserError, match="config.json: No such file"):
        check_model_folder(config)
    (tmp_path / "config.json").write_text('{"num_attention_heads": 9}')
    with pytest.raises(UserError, match="no \\*.safetensors"):
        check_model_folder(config)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="/config.json holds no JSON object, but list"):
        check_model_folder(config)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text('{"eos')
    with pytest.raises(UserError, match="generation_config.json is not valid JSON"):
        check_model_folder(config)
    with pytest.raises(UserError, match="3 ranks are not divisible by rollout.tensor_parallel=2"):
        check_world(config, 3)


def test_shipped_configurations_load():
    """Those of configs/recipes lie over another one."""
    quickstart = ROOT / "configs" / "quickstart.yaml"
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        if path.name != "base.yaml":
            check(load_config(path))
    recipes = sorted((ROOT / "configs" / "recipes").glob("*.yaml"))
    assert recipes
    for path in recipes:
        check(load_config(quickstart, [str(path)]))


def test_every_section_is_frozen():
    config = load_config(ROOT / "configs" / "quickstart.yaml")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train.steps = 3  # type: ignore[misc]


def test_dry_run_prints_config_graph_and_schedule_without_a_model_load():
    command = [sys.executable, "spmd_rl/main.py", "configs/quickstart.yaml", "--dry-run", "--ranks", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "prompts_per_step: 8" in done.stdout
    assert "samples per step: 64" in done.stdout
    assert "schedule of ranks 0-2, each step" in done.stdout
    assert re.search(r"\d+\. run +rollout: prompt -> response", done.stdout)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--dry-run", "--ranks=-3"], "--ranks=-3: a number of ranks from 1"),
        (["--dry-run", "--ranks=0"], "--ranks=0: a number of ranks from 1"),
        (["--ranks=2"], "--ranks=2 needs --dry-run"),
    ],
)
def test_a_wrong_number_of_ranks_is_one_line(capsys, arguments, said):
    assert main(["configs/quickstart.yaml", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&-"])
def test_closed_standard_streams_do_no_harm(closed):
    command = [sys.executable, "spmd_rl/main.py", "configs/quickstart.yaml", "--dry-run", "--ranks=-3"]
    shell = ["bash", "-c", f'exec "$@" {closed}', "bash", *command]
    done = subprocess.run(shell, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert done.stderr == "" if "2>&-" in closed else done.stderr.startswith("error: --ranks=-3")
