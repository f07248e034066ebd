"""The ``fabric-ray`` command."""
