"""Judging a trajectory. `REWARDS` holds the names a recipe may use; with none, the environment's own rewards stand."""

from renma.registry import Registry

REWARDS = Registry(
    "reward",
    {
        "success": "renma.rewards.outcome:Success",
        "answer_number": "renma.rewards.outcome:AnswerNumber",
        "format": "renma.rewards.outcome:Format",
        "turns": "renma.rewards.outcome:Turns",
        "overlong": "renma.rewards.outcome:Overlong",
        "reward_model": "renma.rewards.learned:OutcomeModelReward",
        "process_reward_model": "renma.rewards.learned:ProcessModelReward",
    },
)
