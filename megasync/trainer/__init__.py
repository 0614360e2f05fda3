"""Megatron ranks that hold the policy, score tokens and take optimizer steps. Imports no Ray.

`MegatronLearner` (learner) holds the model; `PolicyTrainer` (policy) turns groups into optimizer steps and is the only
part that knows about groups and rewards. Import them from their modules, after `Device.prepare_process`.
"""
