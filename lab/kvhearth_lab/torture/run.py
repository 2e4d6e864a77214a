"""Runs world after world until the time is over."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvhearth.errors import KVHearthError, Reason
from kvhearth_lab.harness.remote_server import installed
from kvhearth_lab.torture.checks import capacity, check, finish
from kvhearth_lab.torture.faults import TABLE
from kvhearth_lab.torture.plan import Plan, SeededPlan, StepLog, recorded
from kvhearth_lab.torture.report import Metronome, Report, Stalls
from kvhearth_lab.torture.scene import PATIENCE_S, CapacityWatch, Roots, places
from kvhearth_lab.torture.world import UselessError, World

_WARM_S = 0.4
_LEAST_S = 2.0
"""Time reserved for a world's end; no step begins that could not finish before it."""
_STEP_S = 4.0
"""Upper bound on the expected duration of a step."""
_WORLD_S = 7.0
"""Least remaining time for a new world, except the first; with less it could try nothing."""

_SHAPES = 64
"""Number of worlds that together have every shape."""

Progress = Callable[[float, str], None]
"""Called with (elapsed seconds, current activity)."""


@dataclass(frozen=True)
class Options:
    """Options of a run.

    Attributes:
        seed: seed of all random choices.
        seconds: time by which the last world is over, unless its last step took unusually long.
        faults: names of faults; empty for all.
        ssd: include worlds with a drive.
        gateway: whether worlds have remote clients; None for some of them.
        remote: whether worlds have a remote behind memory; None for some of them, where a remote's
            library is installed.
        first: number of the first world.
        worlds: number of worlds, 0 for as many as there is time for.
        log: file to write steps to.
        replay: log whose steps are repeated.
        keep: keep the directories of worlds with findings.
    """

    seed: int
    seconds: float
    roots: Roots
    faults: Sequence[str] = ()
    ssd: bool = True
    gateway: bool | None = None
    remote: bool | None = None
    first: int = 0
    worlds: int = 0
    log: Path | None = None
    replay: Path | None = None
    keep: bool = False

    def plans(self) -> Iterable[Plan]:
        """Return the worlds to run.

        Raises:
            KVHearthError: ``config_invalid`` for unknown faults, for faults that cannot happen in
                these worlds, or for an invalid log.
        """
        unknown = sorted(set(self.faults) - TABLE.keys())
        if unknown:
            known = ", ".join(TABLE)
            raise KVHearthError(
                Reason.CONFIG_INVALID, f"--faults: no {', '.join(unknown)}; known: {known}"
            )
        if self.replay is not None:
            return recorded(self.replay)
        faults = list(self.faults or TABLE)
        tiers = () if self.remote is False else installed()
        if self.remote and not tiers:
            raise KVHearthError(
                Reason.CONFIG_INVALID, "--remote needs a remote's library: pip install kvhearth[s3]"
            )
        seeded = SeededPlan(
            self.seed, faults, self.ssd, self.first, self.gateway, tiers, self.remote
        )
        shapes = list(itertools.islice(seeded.shapes(), self.worlds or _SHAPES))
        idle = [name for name in self.faults if not any(map(TABLE[name].fits, shapes))]
        # One world need not fit all requested faults, but must fit at least one.
        if idle and (not self.worlds or len(idle) == len(self.faults)):
            raise KVHearthError(
                Reason.CONFIG_INVALID,
                f"--faults: {', '.join(idle)} cannot happen in the worlds that are left by "
                "--no-ssd, --no-gateway, --no-remote or --world, and by what is installed",
            )
        return seeded.plans()


def run(options: Options, progress: Progress) -> dict[str, Any]:
    """Run the torture and return the figures of ``Report.as_json``.

    Raises:
        KVHearthError: ``config_invalid`` for invalid options.
    """
    options.roots.check(ssd=options.ssd)
    plans = options.plans()
    report, stalls = Report(), Stalls()
    log = StepLog(options.log)
    metronome = Metronome(stalls.late)
    metronome.start()
    begin = time.monotonic()
    course = _Course(options, report, stalls, log, begin, progress)
    kept: list[str] = []
    try:
        for count, plan in enumerate(plans):
            over = time.monotonic() - begin > options.seconds - _WORLD_S
            if (count and over) or (options.worlds and count >= options.worlds):
                break
            kept += _world(course, plan)
    finally:
        metronome.stop(PATIENCE_S)
        log.close()
    report.machine_late_s = stalls.late_s
    found = report.as_json(options.seed, time.monotonic() - begin)
    return {**found, "kept": kept}


@dataclass(frozen=True)
class _Course:
    """Objects shared by all worlds of a run."""

    options: Options
    report: Report
    stalls: Stalls
    log: StepLog
    begin: float
    progress: Progress

    def step_s(self, over_s: float) -> float:
        """Estimate the seconds of a step from earlier ones; 0 for the first."""
        return min(_STEP_S, over_s / self.report.steps) if self.report.steps else 0.0


def _world(course: _Course, plan: Plan) -> list[str]:
    """Run one world and return those of its directories that are kept."""
    options, report, log = course.options, course.report, course.log
    keep: list[bool] = []
    before = len(report.texts)
    with places(options.roots, keep) as where:
        log.world(plan)
        for name in plan.faults:
            report.coverage.aims.update(TABLE[name].aims(plan.shape))
        world = World(plan, where, report, course.stalls)
        watch = CapacityWatch(where.ssd)
        watch.start()
        try:
            world.begin()
            world.traffic(_WARM_S)
            for number, step in enumerate(plan.steps, 1):
                at_s = time.monotonic() - course.begin
                if at_s > options.seconds - _LEAST_S - course.step_s(at_s):
                    break
                course.progress(at_s, f"world {plan.number} ({plan.shape.kind}): {step.fault}")
                world.step = number
                log.step(plan.number, number, step, at_s)
                TABLE[step.fault].run(world, step.parameters)
                report.faults[step.fault] += 1
                report.steps += 1
                check(world)
                capacity(world, watch)
            world.step += 1
            finish(world)
            capacity(world, watch)
        except UselessError:
            pass
        finally:
            watch.stop(PATIENCE_S)
            for client in world.clients:
                if client.alive:
                    client.kill()
            world.daemon.kill()
            world.network.stop()
            world.end_server()
        world.judge_slow()
        report.worlds[plan.shape.kind] += 1
        report.excused.update(world.oracle.excused)
        report.figures["most_ssd_share_permille"] = max(
            report.figures["most_ssd_share_permille"],
            1000 * watch.most_bytes // plan.shape.ssd_bytes if plan.shape.ssd_bytes else 0,
        )
        log.note(plan.number, world.step, findings=report.texts[before:])
        if options.keep and len(report.texts) > before:
            keep.append(True)
            return [str(where.folder)]
    return []
