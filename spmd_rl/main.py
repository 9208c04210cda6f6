"""Entry point: every rank runs this same file.

torchrun --nproc-per-node=2 spmd_rl/main.py configs/quickstart.yaml train.steps=4
torchrun --nproc-per-node=2 spmd_rl/main.py configs/quickstart.yaml configs/recipes/dapo.yaml
mpirun -n 2 python spmd_rl/main.py configs/quickstart.yaml
srun python spmd_rl/main.py configs/quickstart.yaml
python spmd_rl/main.py configs/quickstart.yaml --dry-run --ranks 8
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path


def _open_standard_streams() -> None:
    """A stream that is closed (`>&-`) leaves its number to the next file, into which messages would then be written."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one
            setattr(sys, name, os.fdopen(null, "w" if number else "r", encoding="utf-8"))


_open_standard_streams()

# Started as a file, Python puts the package's own folder first on the path, where a third-party `import data` or
# `import ops` would find ours. The folder above it is what we need.
_PACKAGE = Path(__file__).resolve().parent
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _PACKAGE]
if str(_PACKAGE.parent) not in sys.path:
    sys.path.insert(0, str(_PACKAGE.parent))

from spmd_rl.comm.placement import detect  # noqa: E402
from spmd_rl.config.check import check, check_model_folder, check_world, derived_sizes  # noqa: E402
from spmd_rl.config.errors import UserError  # noqa: E402
from spmd_rl.config.load import load_config, to_yaml  # noqa: E402
from spmd_rl.config.schema import Config  # noqa: E402

EXIT_FAILED, EXIT_USER_ERROR = 1, 2
_OTHERS_WAIT_S = 15.0
_MOST_RANKS = 1_000_000  # of a dry run: a number beyond is a slip of the finger that would fill the memory


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job that the command line describes; the exit status."""
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    try:
        _check_ranks(arguments)
        config = load_config(arguments.config, arguments.overrides)
        check(config)
        check_model_folder(config)
        if arguments.dry_run:
            print(dry_run(config, detect(os.environ).size if arguments.ranks is None else arguments.ranks))
            return 0
        # Imported late: `--help` and a mistyped key should not wait for torch.
        from spmd_rl.job import run

        return run(config)
    except UserError as error:
        _complain(error)
        return EXIT_USER_ERROR


def dry_run(config: Config, ranks: int) -> str:
    """The resolved configuration, the graph, and what each distinct rank would do; loads no model."""
    from spmd_rl.graph.describe import describe_graph, describe_plan
    from spmd_rl.graph.graph import declare, resolve
    from spmd_rl.graph.plan import make_plan
    from spmd_rl.recipes.contract import check_contract

    if config.mode == "async":
        return _dry_run_async(config, ranks)
    declared = declare(config, ranks)
    check_contract(declared)
    check_world(config, ranks)
    graph = resolve(declared, ranks)
    sizes = "\n".join(f"  {name}: {value:g}" for name, value in derived_sizes(config, ranks).items())
    return (
        f"# configuration\n{to_yaml(config)}\n# derived sizes on {ranks} ranks\n{sizes}\n\n"
        f"# graph\n{describe_graph(graph)}\n\n# plan\n{describe_plan(make_plan(graph))}"
    )


def _dry_run_async(config: Config, ranks: int) -> str:
    """The same for both roles."""
    from spmd_rl.graph.describe import describe_graph, describe_plan
    from spmd_rl.graph.plan import make_plan
    from spmd_rl.graph.stage import rank_spans
    from spmd_rl.job_async import cast

    made = cast(config, ranks)
    parts = [f"# configuration\n{to_yaml(config)}"]
    for role, graph in (("train", made.train), ("rollout", made.rollout)):
        own = made.roles.as_mapping()[role]
        parts.append(
            f"# role {role}: ranks {rank_spans(own)}, numbered from 0 below\n{describe_graph(graph)}\n\n"
            f"{describe_plan(make_plan(graph))}"
        )
    return "\n\n".join([*parts, f"# from rollout to train: {', '.join(made.halves.columns)}"])


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="spmd_rl/main.py", description="Reinforcement-learning post-training as a plain SPMD program."
    )
    parser.add_argument("config", help="YAML file with the settings (see configs/)")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="settings, or further YAML files, that replace its own",
    )
    parser.add_argument("--dry-run", action="store_true", help="print configuration, graph and schedules, then end")
    parser.add_argument("--ranks", type=int, help="world size for --dry-run (default: this launch's own)")
    return parser.parse_intermixed_args(list(argv))


def _check_ranks(arguments: argparse.Namespace) -> None:
    if arguments.ranks is None:
        return
    if not arguments.dry_run:
        raise UserError(f"--ranks={arguments.ranks} needs --dry-run: in a run the launcher decides how many there are")
    if not 1 <= arguments.ranks <= _MOST_RANKS:
        raise UserError(f"--ranks={arguments.ranks}: a number of ranks from 1 to {_MOST_RANKS} is wanted")


def _complain(error: UserError) -> None:
    """One line for the whole job: rank 0 speaks; another rank only where rank 0 has not failed by the same error,
    in which case the launcher ends this process before it speaks."""
    try:
        rank = detect(os.environ).rank
    except UserError:
        rank = 0
    if rank:
        time.sleep(_OTHERS_WAIT_S)
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        status = main()
    except Exception:
        traceback.print_exc()
        status = EXIT_FAILED
    if status:
        # At once, without the clean-up of half-started libraries: the other ranks wait to see this one gone, and a
        # thread that wants the interpreter during its teardown would end it by SIGABRT.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # closed, or its reader is gone
                stream.flush()
        os._exit(status)
    if "spmd_rl.comm.bootstrap" in sys.modules:
        from spmd_rl.comm.bootstrap import leave

        leave(status)
    sys.exit(status)
