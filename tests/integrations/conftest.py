from gateway_rig import make_rig, rig  # noqa: F401 - fixtures
