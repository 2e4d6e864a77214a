"""Source of worlds and steps: a seed's random numbers, or the log of an earlier run."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from kvhearth.errors import KVHearthError, Reason
from kvhearth_lab.torture.decks import Decks
from kvhearth_lab.torture.faults import TABLE
from kvhearth_lab.torture.world_config import Shape, shape_of

STEPS_MAX = 10
VERSION = 5


@dataclass
class Step:
    """One fault with its parameters."""

    fault: str
    parameters: dict[str, Any]


@dataclass
class Plan:
    """One world: its number, the run's seed, its shape, its steps, and the faults that the steps
    were chosen from.
    """

    number: int
    seed: int
    shape: Shape
    steps: Sequence[Step]
    faults: frozenset[str] = frozenset()


@dataclass
class SeededPlan:
    """An endless sequence of worlds from a seed.

    A world's shape and the parameters of its steps depend only on the seed and its number, so that
    one world can be repeated without those before it. Faults, and their aims, are dealt from the
    run's decks, which earlier worlds advance: all are covered evenly, however few fit into the
    time.
    """

    seed: int
    faults: Sequence[str]
    ssd: bool
    first: int = 0
    gateway: bool | None = None
    tiers: Sequence[str] = ()
    remote: bool | None = None

    def plans(self) -> Iterator[Plan]:
        """Yield the worlds from ``first`` on."""
        decks = Decks(self.seed)
        for number in itertools.count():
            rng, shape = self._shape(number)
            steps = list(self._steps(rng, decks, shape))
            if number >= self.first:
                yield Plan(number, self.seed, shape, steps, frozenset(self.faults))

    def shapes(self) -> Iterator[Shape]:
        """Yield the shapes of the worlds from ``first`` on."""
        for number in itertools.count(self.first):
            yield self._shape(number)[1]

    def _shape(self, number: int) -> tuple[random.Random, Shape]:
        rng = random.Random(f"{self.seed}/{number}")
        shape = shape_of(
            *(rng, number),
            ssd=self.ssd,
            skewed="clock_jump" in self.faults,
            gateway=self.gateway,
            tiers=self.tiers,
            remote=self.remote,
        )
        return rng, shape

    def _steps(self, rng: random.Random, decks: Decks, shape: Shape) -> Iterator[Step]:
        fitting = [name for name in self.faults if TABLE[name].fits(shape)]
        if not fitting:
            return
        taken = [name for name in fitting if TABLE[name].in_each_world]
        cards = [name for name in self.faults for _ in range(TABLE[name].weight)]
        count = rng.randint(STEPS_MAX // 2, STEPS_MAX) - len(taken)
        taken += decks.names("faults", cards).deal(count, fitting.__contains__)
        rng.shuffle(taken)
        for fault in map(TABLE.__getitem__, taken):
            yield Step(fault.name, {**fault.plan(rng, shape), **fault.deal(decks, shape)})


def recorded(path: Path) -> list[Plan]:
    """Return the worlds of a log.

    Raises:
        KVHearthError: ``config_invalid`` for a file that is no such log, or has no step.
    """
    worlds: dict[int, tuple[dict[str, Any], list[Step]]] = {}
    try:
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            if "shape" in line:
                worlds[line["world"]] = (line, [])
            elif "fault" in line:
                worlds[line["world"]][1].append(Step(line["fault"], line["parameters"]))
        plans = []
        for number, (line, steps) in worlds.items():
            faults = frozenset(each.fault for each in steps)
            if line["version"] != VERSION or faults - TABLE.keys():
                raise ValueError("written by another version")
            shape = Shape.from_json(line["shape"])
            plans.append(Plan(number, int(line["seed"]), shape, steps, faults))
        if not any(plan.steps for plan in plans):
            raise ValueError("it has no world with a step, as --log writes them")
        return plans
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise KVHearthError(Reason.CONFIG_INVALID, f"--replay {path}: {error}") from None


class StepLog:
    """Writes each step before it is executed, one JSON object a line.

    Raises:
        KVHearthError: ``config_invalid`` for a file that cannot be written.
    """

    def __init__(self, path: Path | None) -> None:
        try:
            self._file: IO[str] | None = None if path is None else path.open("w", encoding="utf-8")
        except OSError as error:
            raise KVHearthError(
                Reason.CONFIG_INVALID, f"--log {path} cannot be written: {error.strerror}"
            ) from None

    def world(self, plan: Plan) -> None:
        """Record the begin of a world."""
        self._write(
            {
                "world": plan.number,
                "version": VERSION,
                "seed": plan.seed,
                "shape": plan.shape.as_json(),
            }
        )

    def step(self, world: int, number: int, step: Step, at_s: float) -> None:
        """Record the begin of a step."""
        self._write(
            {
                "world": world,
                "step": number,
                "fault": step.fault,
                "parameters": step.parameters,
                "at_s": round(at_s, 3),
            }
        )

    def note(self, world: int, step: int, **facts: Any) -> None:
        """Record the result of a step."""
        self._write({"world": world, "step": step, **facts})

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
