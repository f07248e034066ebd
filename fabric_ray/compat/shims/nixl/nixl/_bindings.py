"""``nixl._bindings`` over fabric-ray: the module itself, so that what is set here is seen there."""

import sys

from fabric_ray.compat.nixl import bindings

sys.modules[__name__] = bindings
