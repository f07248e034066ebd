"""``export PYTHONPATH=$(python -m fabric_ray.compat nixl):$PYTHONPATH``"""

from __future__ import annotations

import sys

from fabric_ray.compat import shim_path
from fabric_ray.errors import InvalidArgument

if __name__ == "__main__":
    try:
        print(shim_path(*sys.argv[1:]))
    except InvalidArgument as error:
        sys.exit(str(error))
