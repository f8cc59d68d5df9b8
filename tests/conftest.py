"""Settings for all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A property is about values, not about how busy the machine is: its first example may import a large library.
settings.register_profile("renma", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("renma")
