"""Weight pushes on a virtual clock: the plan, the steps and the group are the real ones."""

from fabric_ray.weights.simulation.run import Simulated, simulate
from fabric_ray.weights.simulation.setting import PER_CALL, STAGES, Cluster, Costs, Setting

__all__ = ["PER_CALL", "STAGES", "Cluster", "Costs", "Setting", "Simulated", "simulate"]
