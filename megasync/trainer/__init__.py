"""The trainer pool's room: Megatron ranks that hold the policy, score tokens and take optimizer steps.

Nothing here imports Ray, and only `policy` knows about groups and rewards. `MegatronEngine` (engine) holds the model,
`PolicyTrainer` (policy) turns groups into steps; import them from their modules, after the process has been prepared.
"""
