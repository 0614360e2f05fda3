"""Installs the packages of a lock: `megasync install`, `launch/setup.sh` and `launch/gpu_environment.sh` all end here.

    lock                          has                                   megasync install NAME
    ----------------------------  ------------------------------------  ------------------------------------------------
    cpu                           a whole environment, SGLang for CPUs  installs its pins, without dependencies
    gpu                           a whole environment for CUDA 13       the same, by hashes; builds what has no wheel
    engines, lint, serve, ...     what is added to one of the two       the same as cpu
    rehearsal                     packages that are only read           unpacks each into a folder off Python's path
    openenv, verifiers            a whole environment of its own        makes that in a folder of this one

Only the standard library is imported here and in `environment`: a checkout runs both before there is any package.

Invariant: what is installed is complete. pip writes a package's INSTALLER file after its other files, and
`installed_versions` counts only packages that have one; so an installation that was interrupted goes on where it
stopped, and repairs the package that it was writing.
"""

from megasync.install.environment import make_environment

__all__ = ["make_environment"]
