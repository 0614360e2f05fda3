"""Moves weights from the trainer's ranks into SGLang's servers, as versions.

`choose_sync` picks a transport (`WeightSync`: shard to shard, broadcast or disk); `VersionPublisher` publishes through
it and checks the result. A ``sender`` or ``writer`` runs on the trainer ranks, a ``sync`` in the driver, the plugin
and the receiver in SGLang's processes.
"""
