"""DRO as in verl: a policy gradient with a quadratic penalty on the log ratio of each token."""

from __future__ import annotations

from megasync.algorithms.losses.tokens import PolicyTokens, TokenLoss


def dro(tokens: PolicyTokens, *, beta: float = 0.1) -> TokenLoss:
    """``-(A log pi - beta / 2 (log pi - log pi_old)^2)``, as verl 0.9.1's ``dro``.

    It is a variant of Richemond et al. 2024, arXiv 2405.19107, which penalises the log ratio of a whole
    response to the reference policy, and learns a value of the prompt in place of an advantage. Tokens without an
    advantage are penalised too. In the first optimizer step of a batch the ratio is 1, and nothing is penalised.
    """
    return TokenLoss(0.5 * beta * tokens.log_ratio.square() - tokens.advantages * tokens.logprobs)
