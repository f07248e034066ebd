"""``deep_ep_cpp``, from which callers of older releases import."""

from fabric_ray.compat import refuse_installed

refuse_installed("deep_ep_cpp", __file__)

from fabric_ray.moe.deepep import Config, EventHandle, topk_idx_t  # noqa: E402

__all__ = ["Config", "EventHandle", "topk_idx_t"]
