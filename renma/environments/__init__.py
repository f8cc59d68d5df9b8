"""What an agent acts in. `ENVIRONMENTS` and `DEMONSTRATORS` hold the names a recipe may use."""

from renma.registry import Registry

ENVIRONMENTS = Registry("environment", {"calculator": "renma.environments.calculator:CalculatorEnvironment"})

DEMONSTRATORS = Registry(
    "demonstrator",
    {
        "arithmetic": "renma.environments.demonstrators:ArithmeticDemonstrator",
        "word_problems": "renma.environments.demonstrators:WordProblemDemonstrator",
    },
)
