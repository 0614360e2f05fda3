"""megasync as an engine of verl: importing this package registers it, and verl imports it by its entry point.

verl swallows whatever a plugin raises. So the same import happens again, aloud, when a configuration names
`MegasyncEngineConfig`; and `megasync doctor` tries it in a fresh interpreter.
"""

from megasync.integrations.verl_versions import check_version

check_version()

from megasync.integrations.verl.platform import CpuPlatform

# Before verl's engines are imported, which ask for the platform.
CpuPlatform.install()

from megasync.integrations.verl.config import MegasyncEngineConfig
from megasync.integrations.verl.engine import MegasyncEngine, MegasyncValueEngine, register

register()

__all__ = ["CpuPlatform", "MegasyncEngine", "MegasyncEngineConfig", "MegasyncValueEngine"]
