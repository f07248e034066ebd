"""Mooncake's transfer engine over fabric-ray; what else an installed Mooncake has stays its own."""

import pkgutil

__path__ = pkgutil.extend_path(__path__, __name__)
