"""Does our GRPO learn at least as well as TRL's? The quickstart's task, the same samples per step, several seeds.

    perf/peer_env.sh trl && .venv/bin/python perf/learning_trl.py --check     # an hour on 2 cores, nearly all TRL's

Both train as perf/end_to_end.py starts them. Per run the gain is the mean reward of the last fifth of the steps less
that of the first fifth. One JSON object per seed and a summary; `--svg` draws the curves. Finished runs are kept in
--folder and not repeated. `--check` exits with 1 where our mean gain lies below TRL's by more than one standard error
of their difference.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from math import sqrt
from pathlib import Path
from statistics import mean, variance

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # when run as a script, from a checkout that is not installed

from perf.end_to_end import Bench, Step  # noqa: E402
from perf.learning_curves import Learned, gain, panels  # noqa: E402
from spmd_rl.config.load import load_config  # noqa: E402

PROGRAMS = ("ours", "trl")


def main() -> int:
    arguments = parse()
    steps = {program: [train(arguments, program, seed) for seed in range(arguments.seeds)] for program in PROGRAMS}
    gains = {program: [gain([step.reward for step in run]) for run in runs] for program, runs in steps.items()}
    for seed, pair in enumerate(zip(*gains.values(), strict=True)):
        print(json.dumps({"case": f"seed {seed}", **dict(zip(PROGRAMS, pair, strict=True))}), flush=True)
    ours, trl = (mean(gains[program]) for program in PROGRAMS)
    error = sqrt(sum(variance(part) / len(part) for part in gains.values())) if arguments.seeds > 1 else 0.0
    summary = {"case": "gain of mean reward", "steps": arguments.steps, "seeds": arguments.seeds, "ours": ours}
    print(json.dumps(summary | {"trl": trl, "standard_error": error, "met": ours >= trl - error}))
    print(f"{'gain of mean reward':<24} ours {ours:.3f}, TRL {trl:.3f}, standard error {error:.3f}", file=sys.stderr)
    if arguments.svg:
        Path(arguments.svg).write_text(panels([curves("grpo", steps["ours"]), curves("TRL", steps["trl"])]))
    return 1 if arguments.check and ours < trl - error else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings of configs/quickstart.yaml")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--trl-ranks", type=int, default=1, help="processes of TRL on the same cores")
    parser.add_argument("--trl-accumulation", type=int, default=4, help="micro-batches of TRL per step, for memory")
    parser.add_argument("--threads", type=int, default=1, help="per rank of ours")
    parser.add_argument("--folder", default=str(ROOT / "runs" / "learning_trl"), help="where finished runs are kept")
    parser.add_argument("--svg", default="", help="file for the curves, e.g. docs/learning_trl.svg")
    parser.add_argument("--check", action="store_true", help="exit with 1 where ours learns less")
    return parser.parse_intermixed_args()


def train(arguments: argparse.Namespace, program: str, seed: int) -> list[Step]:
    """The steps of one run, which is made where it is not there."""
    kept = Path(arguments.folder) / f"{program}-{seed}-{arguments.steps}.json"
    if not kept.exists():
        overrides = [*arguments.overrides, f"run.seed={seed}"]
        config = load_config(str(ROOT / "configs" / "quickstart.yaml"), overrides)
        with tempfile.TemporaryDirectory(prefix="learning-trl-") as name:
            bench = Bench(argparse.Namespace(**{**vars(arguments), "overrides": overrides}), config, Path(name))
            run = bench.run(program, "natural", arguments.steps)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps([vars(step) for step in run.steps]))
    return [Step(**line) for line in json.loads(kept.read_text())]


def curves(name: str, runs: list[list[Step]]) -> Learned:
    lines = [[{"reward/mean": step.reward, "time/step": step.seconds} for step in run] for run in runs]
    return Learned.of(name, lines)


if __name__ == "__main__":
    sys.exit(main())
