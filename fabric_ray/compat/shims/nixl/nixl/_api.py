"""``nixl._api`` over fabric-ray: the module itself, so that what is set here is seen there."""

import sys

from fabric_ray.compat.nixl import agent

sys.modules[__name__] = agent
