"""A graph and its plan as text: what `--dry-run` prints."""

from __future__ import annotations

from spmd_rl.graph.graph import ResolvedGraph
from spmd_rl.graph.plan import Plan
from spmd_rl.graph.stage import rank_spans


def describe_graph(graph: ResolvedGraph) -> str:
    """One line per engine and stage: placement, mesh, columns in and out."""
    lines = ["engines"]
    for engine in graph.engines:
        lines.append(f"  {engine.name:<12} on {graph.engine_placements[engine.name].describe()}")
    lines.append("stages")
    for stage in graph.order:
        lines.append(f"  {stage.name:<12} on {graph.placements[stage.name].describe()}")
        facts = {
            "consumes": ", ".join(stage.consumes),
            "produces": ", ".join(stage.produces),
            "after": ", ".join(stage.after),
            "balanced by": ", ".join(stage.cost) if stage.balance else "",
            "every": f"{stage.every} steps" if stage.every > 1 else "",
        }
        lines += [f"    {name} {value}" for name, value in facts.items() if value]
    return "\n".join(lines)


def describe_plan(plan: Plan) -> str:
    """Each distinct schedule once, with the ranks that have it."""
    done = [
        (op.describe() + (f" (every {op.every} steps)" if op.every > 1 else ""), op.ranks) for op in plan.operations
    ]  # once, not per rank: each `ranks` is a set as large as the world
    schedules: dict[tuple[str, ...], list[int]] = {}
    for rank in range(plan.world_size):
        lines = tuple(line for line, ranks in done if rank in ranks)
        schedules.setdefault(lines, []).append(rank)
    parts = []
    for lines, ranks in schedules.items():
        parts.append(f"schedule of rank{'s' if len(ranks) > 1 else ''} {rank_spans(ranks)}, each step")
        parts += [f"  {number:>2}. {line}" for number, line in enumerate(lines, 1)]
    return "\n".join(parts)
