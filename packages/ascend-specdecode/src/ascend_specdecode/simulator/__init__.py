"""Runs of the engine in virtual time, with costs of a hardware profile and seeded faults."""

from ascend_specdecode.simulator.campaigns import Campaign, campaign, replay_command
from ascend_specdecode.simulator.clock import Backend, DeadlockError, VirtualTimeLoop, run_virtual
from ascend_specdecode.simulator.costs import (
    DecodeCost,
    ModelShape,
    decode_cost,
    model_shape,
    model_shapes,
)
from ascend_specdecode.simulator.faults import FaultRates, Faults, InjectedError
from ascend_specdecode.simulator.models import (
    SimulatedDrafter,
    SimulatedTarget,
    SimulatedVerifier,
    continuation,
)
from ascend_specdecode.simulator.runs import RunResult, make_engine, run
from ascend_specdecode.simulator.scenarios import Scenario, scenario
from ascend_specdecode.simulator.speed import SpeedResult, Workload, measure_speed

__all__ = [
    "Backend",
    "Campaign",
    "DeadlockError",
    "DecodeCost",
    "FaultRates",
    "Faults",
    "InjectedError",
    "ModelShape",
    "RunResult",
    "Scenario",
    "SimulatedDrafter",
    "SimulatedTarget",
    "SimulatedVerifier",
    "SpeedResult",
    "VirtualTimeLoop",
    "Workload",
    "campaign",
    "continuation",
    "decode_cost",
    "make_engine",
    "measure_speed",
    "model_shape",
    "model_shapes",
    "replay_command",
    "run",
    "run_virtual",
    "scenario",
]
