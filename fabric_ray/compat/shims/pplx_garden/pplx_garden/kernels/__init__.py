"""``pplx_garden.kernels``."""
