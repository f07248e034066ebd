"""The kernels of pplx-garden over fabric-ray. They don't take the place of an installed one."""

from fabric_ray.compat import refuse_installed

refuse_installed("pplx_garden", __file__)
