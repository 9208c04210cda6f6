"""What every recipe must bring, because the job uses it between the steps of the graph."""

from __future__ import annotations

from spmd_rl.config.errors import UserError
from spmd_rl.graph.graph import Graph

ENGINES = {
    "tokenizer": "samples are written as text",
    "loader": "it says when the data has ended, and has the prompts of evaluations",
    "rollout": "evaluations draw with it",
    "reward": "evaluations are scored by it",
    "actor": "its weights are exported at the end",
}
STAGES = {
    "sync": "after a resume it brings the weights to the rollout engine",
}


def check_contract(graph: Graph) -> None:
    """Raises UserError where the job would miss an engine or a stage of the graph."""
    declared = {engine.name for engine in graph.engines}, {stage.name for stage in graph.stages}
    for kind, wanted, names in zip(("engine", "stage"), (ENGINES, STAGES), declared, strict=True):
        for name, purpose in wanted.items():
            if name not in names:
                raise UserError(f"the graph has no {kind} named {name!r}, which the job needs: {purpose}")
