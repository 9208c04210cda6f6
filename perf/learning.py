"""Does each recipe learn? GRPO and everything in configs/recipes, over several seeds.

    .venv/bin/python perf/learning.py --check --svg docs/learning.svg                # the small task: some minutes
    .venv/bin/python perf/learning.py --task quickstart --steps 24 --recipes dapo    # SmolLM2-135M: many minutes a seed

The small task (small_task.py) is learned from random weights with the transformers rollout in one process, two where
ranks that draw and ranks that train are apart; the other one is the quickstart's. Settings that only the size of the
small model asks for are in `OWN`, and everything else is the recipe's file.

Per run the gain is the mean reward of the last fifth of the steps less that of the first fifth; a recipe has learned
where the lower end of the one-sided 95 % interval of its gain over the seeds (Student's t) lies above 0. Prints a table
and one JSON line per recipe, and draws the curves to --svg. Runs that are finished are not repeated: the folder keeps
them. `--check` exits with 1 where a recipe has not learned.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # when run as a script, from a checkout that is not installed

from perf import small_task  # noqa: E402
from perf.learning_curves import BASELINE, Learned, panels  # noqa: E402

FILES = {path.stem: path for path in sorted((ROOT / "configs" / "recipes").glob("*.yaml"))}
QUIET = (
    *("eval.at_start=false", "eval.at_end=false", "eval.every=0", "checkpoint.every=0", "checkpoint.export=false"),
    *("observe.tensorboard=false", "observe.timeline=false", "observe.console_samples=0"),
)
SMALL_LR = 5e-3
# Of the small task: the recipes' own are made for models a thousand times as large.
OWN = {
    "lora": ["train.optimizer.lr=1e-2"],
    "ppo": [f"critic.optimizer.lr={SMALL_LR}"],
    "dapo": ["algorithm.dynamic_sampling_tries=40"],  # a policy that is nearly sure has few groups that differ
}


def main() -> int:
    arguments = parse()
    folder = Path(arguments.folder or ROOT / "runs" / f"learning_{arguments.task}")
    config = ROOT / "configs" / "quickstart.yaml"
    if arguments.task == "small":
        config = small_task.make(folder, arguments.steps, SMALL_LR)
    results = []
    for recipe in arguments.recipes:
        runs = train(arguments, config, folder, recipe)
        results.append(Learned.of(recipe, [read(run)[: arguments.steps] for run in runs]))
        print(json.dumps(results[-1].line()), flush=True)
    print(f"\n{'recipe':<14} {'gain':>8} {'95 % above':>11} {'s/step':>8}")
    for result in results:
        print(f"{result.recipe:<14} {result.gain:>8.3f} {result.lower:>11.3f} {result.seconds:>8.2f}")
    if arguments.svg:
        Path(arguments.svg).write_text(panels(results), encoding="utf-8")
    return 1 if arguments.check and any(result.lower <= 0 for result in results) else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=["small", "quickstart"], default="small")
    parser.add_argument("--recipes", nargs="+", choices=[BASELINE, *FILES], default=[BASELINE, *FILES])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--ranks", type=int, help="default: 1 for the small task, 2 for the other; async: at least 2")
    parser.add_argument("--folder", default="", help="where the runs are kept; default: runs/learning_TASK")
    parser.add_argument("--svg", default="", help="file for the curves, e.g. docs/learning.svg")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="section.key=value", help="further settings of all runs"
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 where a recipe has not learned")
    return parser.parse_args()


def train(arguments: argparse.Namespace, config: Path, folder: Path, recipe: str) -> list[Path]:
    """The folders of one run per seed, which are made where they are not there."""
    runs = [folder / f"{recipe}-{seed}" for seed in range(arguments.seeds)]
    overlay = [str(FILES[recipe])] if recipe in FILES else []
    own = OWN.get(recipe, []) if arguments.task == "small" else []
    lines = [
        [
            *(str(config), *overlay, f"run.folder={run}", f"run.seed={seed}", f"train.steps={arguments.steps}"),
            *(*QUIET, *own, *arguments.set),
        ]
        for seed, run in enumerate(runs)
        if len(read(run)) < arguments.steps
    ]
    ranks = arguments.ranks or (1 if arguments.task == "small" else 2)
    if recipe == "async":
        ranks = max(2, ranks)
    if ranks == 1 and lines:
        start([sys.executable, str(ROOT / "tests" / "integration" / "several.py"), json.dumps(lines)])
    for line in lines if ranks > 1 else ():
        launcher = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1")
        start([sys.executable, *launcher, f"--nproc-per-node={ranks}", str(ROOT / "spmd_rl" / "main.py"), *line])
    return runs


def start(command: Sequence[str]) -> None:
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environ.get("PYTHONPATH")])])
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, env=environ)


def read(run: Path) -> list[dict[str, float]]:
    path = run / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [line for line in map(json.loads, lines) if "reward/mean" in line]


if __name__ == "__main__":
    sys.exit(main())
