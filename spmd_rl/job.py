"""The job of one rank: graph → plan → engines → (resume) → steps, with evaluations and checkpoints between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from spmd_rl.checkpoint.checkpointer import Checkpointer, Outcome
from spmd_rl.checkpoint.export import export_model
from spmd_rl.checkpoint.export_adapter import export_adapter
from spmd_rl.checkpoint.files import read_meta
from spmd_rl.checkpoint.identity import run_identity, unlike
from spmd_rl.checkpoint.load import load_checkpoint
from spmd_rl.checkpoint.resume import is_finished, mark_finished, resolve_resume, step_of
from spmd_rl.comm.bootstrap import bootstrap, describe, shutdown
from spmd_rl.comm.digest import agree
from spmd_rl.comm.liveness import Liveness
from spmd_rl.comm.stop import StopFlag
from spmd_rl.comm.transport import make_transport
from spmd_rl.comm.world import World
from spmd_rl.config.check import check_world, derived_sizes
from spmd_rl.config.errors import UserError
from spmd_rl.config.load import to_yaml
from spmd_rl.config.model_folder import model_identity
from spmd_rl.config.schema import Config
from spmd_rl.data.batch import Batch
from spmd_rl.data.exchange import Coordinator
from spmd_rl.graph.graph import ResolvedGraph, declare, resolve
from spmd_rl.graph.plan import make_plan
from spmd_rl.graph.runner import Runner, peer_groups
from spmd_rl.graph.stage import BuildContext, Context
from spmd_rl.observe.metrics import Metrics
from spmd_rl.observe.recorder import Recorder
from spmd_rl.observe.samples import SampleRecord
from spmd_rl.recipes.contract import check_contract
from spmd_rl.recipes.dynamic import TooFewGroups
from spmd_rl.recipes.evaluate import RECORDED, evaluate, sample_records


def run(config: Config) -> int:
    """Run the whole job on this rank; the exit status."""
    if config.mode == "async":
        from spmd_rl.job_async import run_async

        return run_async(config)
    with StopFlag() as stop:  # before anything slow: a queue may take its time back while the ranks still meet
        world = bootstrap(config.comm, config.run.threads)
        with Liveness(world, config.comm) as watch:
            with watch.stage("start", 0):
                declared = declare(config, world.size)
                check_contract(declared)
                check_world(config, world.size)
                graph = resolve(declared, world.size)
            with ExitStack() as opened, watch.announcing():
                Job(config, world, graph, watch, stop, opened).run()
        shutdown(world)
    return 0


class Job:
    """Everything that one rank holds during a run. Made and run collectively.

    opened: closes the engines and the coordinator in the end, also after an error.
    """

    sampled = "loader"  # the engine beside which samples are recorded

    def __init__(
        self,
        config: Config,
        world: World,
        graph: ResolvedGraph,
        watch: Liveness,
        stop: StopFlag,
        opened: ExitStack,
    ) -> None:
        self.config, self.world, self.watch, self.stop, self.graph = config, world, watch, stop, graph
        self.folder = Path(config.run.folder)
        self.plan = make_plan(graph)
        with watch.stage("start", 0):
            agree(world, "the configuration or the plan", to_yaml(config).encode() + self.plan.digest)
            model = model_identity(config.model.path) if world.rank == 0 else ""
            claim = config.run.resume, run_identity(config), model
            self.resumed = resolve_resume(self.folder, *claim, world.control, opened)
            self.done = step_of(self.resumed)
            self.finished = is_finished(self.folder, self.done, world.control)
        self._claimed()
        self.recorder = Recorder(config.observe, world, self.folder, steps=config.train.steps, restored_step=self.done)
        opened.callback(self.recorder.spans.flush)
        if world.rank == 0:
            (self.folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
        self.recorder.start(f"spmd_rl: {config.run.name}", self._facts())
        self.engines = self._build(opened)
        self.checkpointer = Checkpointer(self.folder / "checkpoints", world, keep=config.checkpoint.keep)
        edges = [(op.source, op.destination) for op in self.plan.exchanges()]
        # An exchange waits for the slowest rank's stage.
        limit_s = max(config.comm.timeout_s, config.comm.stage_timeout_s)
        self.coordinator = Coordinator(world, make_transport(config.comm.transport, world, limit_s), edges)
        opened.callback(self.coordinator.close)
        placed = (*graph.placements.values(), *graph.engine_placements.values())
        self.peers = peer_groups(world, (placement.layout for placement in placed), limit_s)
        self.runner = Runner(config, world, self.plan, self.engines, self.coordinator, self.stage, self.peers)

    @property
    def over(self) -> bool:
        """Whether nothing is left to do: no step, and nothing of what follows the last one."""
        return self.finished and self.done >= self.config.train.steps

    def run(self) -> None:
        """All steps that are left; then the final evaluation, checkpoint, export and report."""
        config, steps = self.config, self.config.train.steps
        if self.over:
            self.recorder.say(
                f"all {steps} steps are done; raise train.steps to go on, or give another run.folder to start anew"
            )
            return
        if self.resumed:
            self._restore(self.resumed)
        self._begin()
        stopped = self._asked_to_stop()
        if config.eval.at_start and not self.resumed and not stopped:
            self._evaluate()
        first, evaluated = self.done, -1
        while self.done < steps and not stopped and not self._exhausted():
            self._step(self.done + 1)
            if config.eval.every and self.done % config.eval.every == 0 and self.done < steps:
                self._evaluate()
                evaluated = self.done
            stopped = self._asked_to_stop()
            if stopped or (config.checkpoint.every and self.done % config.checkpoint.every == 0):
                self._save()
        if stopped:
            self._saved(self.checkpointer.wait())
            self.recorder.say(
                f"stopped by {self.stop.reason or 'another rank'} after step {self.done}; start again to go on"
            )
        else:
            if self.done == first and (first == 0 or self.finished):
                raise UserError(f"no step was made: data.epochs={config.data.epochs} had ended by step {first}")
            self._refuse_unchanged()
            if config.eval.at_end and evaluated != self.done:
                self._evaluate()
            self._finish()
        self._end()
        self.recorder.close()
        if self.world.rank == 0 and not stopped:
            mark_finished(self.folder, self.done)

    def _facts(self) -> dict[str, object]:
        """What stands at the start of the log."""
        return {"launch": describe(self.world), **derived_sizes(self.config, self.world.size)}

    def _claimed(self) -> None:
        """Once the run folder is this run's."""

    def _begin(self) -> None:
        """Before the first step: after a resume the rollout engine needs the weights."""
        if self.resumed:
            with self.stage("restore", self.done):
                context = self._context("actor")
                next(stage for stage in self.graph.order if stage.name == "sync").run(context, Batch.empty())

    def _asked_to_stop(self) -> bool:
        """Whether any rank was. Collective."""
        return self.stop.agreed(self.world)

    def _end(self) -> None:
        """After the last work, before the report is written."""

    @contextmanager
    def stage(self, name: str, step: int) -> Iterator[None]:
        """What this rank does now: for the failure detection, the timeline and `time/<name>`."""
        with self.watch.stage(name, step), self.recorder.spans(name, step):
            yield

    def _build(self, opened: ExitStack) -> dict[str, Any]:
        """The engines of this rank, in the order that the graph declares; every mesh is made by all ranks."""
        engines: dict[str, Any] = {}
        for spec in self.graph.engines:
            placed = self.graph.engine_placements[spec.name]
            with self.watch.stage(f"build {spec.name}", 0), self.recorder.spans(f"build_{spec.name}"):
                mesh = self.world.mesh(placed.ranks, placed.axes)
                if self.world.rank in placed.ranks:
                    engines[spec.name] = spec.build(BuildContext(self.config, self.world, mesh, engines))
                    if hasattr(engines[spec.name], "close"):
                        opened.callback(engines[spec.name].close)
        return engines

    def _step(self, step: int) -> None:
        try:
            with self.recorder.spans("step", step):
                samples, metrics = self._train(step)
        except TooFewGroups as stopped:
            self._keep(step, stopped.accepted)
            raise
        self.done = step
        with self.watch.stage("record", step):
            self.recorder.step(step, metrics, self._records(step, samples))

    def _keep(self, step: int, accepted: Batch) -> None:
        """All ranks gave a step up: what it has accepted goes on record and into a checkpoint."""
        with self.watch.stage("record", step):
            self.recorder.unfinished(self._records(step, accepted))
        self._save(again=True)
        self._saved(self.checkpointer.wait())

    def _records(self, step: int, samples: Batch) -> list[SampleRecord]:
        """As many of this rank's samples as are to be recorded."""
        chosen = torch.tensor(self.recorder.choose(samples.ids), dtype=torch.int64)
        context = replace(self._context(self.sampled), step=step)
        return sample_records(context, samples.select(chosen)) if len(chosen) else []

    def _train(self, step: int) -> tuple[Batch, Metrics]:
        """One step; the samples to record that are this rank's, and its metrics."""
        return self.runner.step(step, keep=RECORDED)

    def _context(self, engine: str) -> Context:
        """As a stage placed like `engine` would see it; for what happens between steps."""
        layout = self.graph.engine_placements[engine].layout
        slot, replica = divmod(layout.ranks.index(self.world.rank), layout.replicas)
        return Context(
            self.config, self.world, self.engines, self.done, Metrics(), slot, layout.slots, replica,
            peers=self.peers.get(layout),
        )  # fmt: skip

    def _evaluate(self) -> None:
        if not self.config.data.eval:
            return
        with self.stage("evaluate", self.done):
            results, records = evaluate(self._context("rollout"))
            self.recorder.evaluation(self.done, results, records)

    def _exhausted(self) -> bool:
        return all(engine.exhausted for engine in self.engines.values() if hasattr(engine, "exhausted"))

    def _states(self) -> Mapping[str, Any]:
        return {name: engine for name, engine in self.engines.items() if hasattr(engine, "state_dict")}

    def _save(self, again: bool = False) -> None:
        with self.stage("checkpoint", self.done):
            states = {name: engine.state_dict() for name, engine in self._states().items()}
            self._saved(self.checkpointer.save(self.done, states, {"config": to_yaml(self.config)}, again))

    def _saved(self, outcome: Outcome | None) -> None:
        """Say how the save before ended; a failed one does not end the run, the checkpoints before it are intact."""
        if outcome is not None and outcome.error:
            self.recorder.say(f"warning: {outcome.error}")

    def _restore(self, path: Path) -> None:
        with self.stage("restore", self.done):
            states = {name: engine.state_dict() for name, engine in self._states().items()}
            try:
                load_checkpoint(path, states, self.world)
            except UserError as error:
                found = unlike(read_meta(path)["config"], self.config)
                raise UserError(f"{error}{': ' if found else ''}{', '.join(found)}") from None
            for name, engine in self._states().items():
                engine.load_state_dict(states[name])
        self.recorder.say(f"resumed from {path} after step {self.done}")

    def _refuse_unchanged(self) -> None:
        """A run whose every update was skipped has trained nothing and must not look as if it had."""
        trained = [
            engine for engine in self.engines.values() if getattr(engine, "version", 0) and hasattr(engine, "skipped")
        ]
        if trained and all(engine.version == engine.skipped for engine in trained):
            raise UserError(
                f"nothing was trained in {self.done} steps: in none of them did a token count in the loss. Every "
                "sample was excluded (reward.on_error, algorithm.nonfinite_logprob) or masked "
                "(algorithm.mask_truncated: raise rollout.max_tokens); reward/excluded and "
                f"response/truncated_fraction in {self.folder}/metrics.jsonl say which"
            )

    def _finish(self) -> None:
        self._save()
        outcome = self.checkpointer.wait()
        self._saved(outcome)
        if self.config.checkpoint.export:
            with self.stage("export", self.done):
                actor = self.engines["actor"]
                export_model(Path(self.config.model.path), self.folder / "model", actor.named_weights(), self.world)
                if self.config.model.lora_rank:
                    settings, weights = actor.adapter_settings(), actor.adapter_weights()
                    export_adapter(self.folder / "adapter", settings, weights, self.world)
        if outcome is not None and outcome.error:
            raise UserError(f"the final checkpoint was not written: {outcome.error}")
