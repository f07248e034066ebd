"""``nixl.logging``: the loggers below ``nixl``."""

import logging


def get_logger(name: str) -> logging.Logger:
    return logging.getLogger(f"nixl.{name.lstrip('_')}")
